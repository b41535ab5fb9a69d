"""Wrong tensors, sources, plans and groups are refused before anything changes."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStateError,
    InvalidRequest,
    WeightPlanMismatch,
    WeightSyncError,
)
from drivetrain.types.capability import Capability
from drivetrain.types.weights import (
    BroadcastSource,
    CommunicatorSpec,
    CudaIpcSource,
    InProcessSource,
    SharedMemorySource,
    WeightSource,
    WeightUpdateRequest,
)
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assets.weight_sources import (
    Between,
    a_matrix,
    from_disk,
    is_waited_for,
    nowhere,
    tensors_of,
    write_checkpoint,
)
from drivetrain_conformance.cases.weight_sync.checks import (
    NEW,
    check_serves,
    check_state,
    same_weights_again,
    unchanged,
)
from drivetrain_conformance.cases.weight_sync.pushing import ONE_BUCKET, free_port, push_source
from drivetrain_conformance.cases.weight_sync.wrong_weights import FAULTS, bad_folders, moved_tensor, without_tensor
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import Strategy, WeightSync, make_plan


@case(Capability.WEIGHTS_SHARED_MEMORY)
async def wrong_tensors_are_refused_by_name(bench: Bench) -> None:
    """A push of missing, extra, misshapen, mistyped or non-finite tensors is refused by name and changes nothing."""
    engine, tensors = bench.engine, tensors_of(bench.other_weights())
    WeightSync.connect(tensors, engine, "shared_memory")  # an unclaimed strategy is refused before the manifest is read
    async with unchanged(bench):
        name = a_matrix(await engine.weight_manifest())
        for fault in FAULTS:
            wrong = dict(tensors)
            fault.spoil(wrong, name)
            for source in (wrong, list(wrong.items())):
                with raises(fault.kind, fault.what) as refusal:
                    await push_source(engine, source, "bad")
                fault.check_named(refusal.error, name)
                check_state(engine, EngineState.READY, fault.what)


@case(Capability.WEIGHTS_DISK)
async def a_wrong_checkpoint_is_refused_by_name(bench: Bench) -> None:
    """A folder with missing, extra, misshapen, mistyped or non-finite tensors is refused by name, changing nothing."""
    engine, tensors = bench.engine, tensors_of(bench.other_weights())
    await same_weights_again(bench)
    async with unchanged(bench):
        name = a_matrix(await engine.weight_manifest())
        for fault in FAULTS:
            wrong = dict(tensors)
            fault.spoil(wrong, name)
            folder = write_checkpoint(bench.folder("wrong"), bench.model, wrong)
            with raises(fault.kind, fault.what) as refusal:
                await engine.load_weights_from_disk(str(folder), "bad")
            fault.check_named(refusal.error, name)
            check_state(engine, EngineState.READY, fault.what)


@case(Capability.WEIGHTS_DISK)
async def a_bad_folder_is_refused_and_the_engine_serves_on(bench: Bench) -> None:
    """A folder that is missing, empty, truncated or garbage is refused, naming it, and changes nothing."""
    engine = bench.engine
    await same_weights_again(bench)
    async with unchanged(bench):
        for what, folder in bad_folders(bench.models, bench.model).items():
            with raises((InvalidRequest, WeightSyncError), what) as refusal:
                await engine.load_weights_from_disk(str(folder), "bad")
            assert folder.name in str(refusal.error), what
            check_state(engine, EngineState.READY, what)
            fifo = folder / "model.safetensors"
            assert not (fifo.is_fifo() and is_waited_for(fifo)), f"a thread waits in open() for {what}"


@case(Capability.WEIGHTS_DISK)
async def a_wrong_argument_of_an_update_is_refused(bench: Bench) -> None:
    """An empty version, an unknown pause mode and digests of other files are refused before anything changes."""
    engine, other = bench.engine, bench.other_weights()
    await same_weights_again(bench)
    async with unchanged(bench):
        with raises(InvalidRequest, "an empty version") as refusal:
            await engine.load_weights_from_disk(str(other), "")
        assert refusal.error.field == "version"
        with raises(InvalidRequest, "an unknown mode") as refusal:
            await engine.load_weights_from_disk(str(other), NEW, mode="later")
        assert refusal.error.field == "mode"
        names = [spec.name for spec in (await engine.weight_manifest()).tensors]
        with raises(WeightSyncError, "digests of other files"):
            await engine.update_named_weights(from_disk(other, digests=dict.fromkeys(names, 1)))


@case(Capability.WEIGHTS_IN_PROCESS)
async def tensors_that_nobody_registered_are_refused(bench: Bench) -> None:
    """An in-process update with a key that no sender registered is refused with a typed error and changes nothing."""
    await _refuse_source(bench, InProcessSource(key="nobody"))


@case(Capability.WEIGHTS_SHARED_MEMORY)
async def shared_memory_that_is_not_there_is_refused(bench: Bench) -> None:
    """A shared-memory update whose arena is gone is refused with a typed error and changes nothing."""
    path = str(nowhere(bench.models))
    await _refuse_source(bench, SharedMemorySource(path=path, nbytes=1 << 40, bucket_offsets=(0,)))


@case(Capability.WEIGHTS_CUDA_IPC, hardware=Hardware.GPU)
async def gpu_memory_that_is_not_there_is_refused(bench: Bench) -> None:
    """An update with a handle to memory of an unknown GPU is refused with a typed error and changes nothing."""
    WeightSync.connect({}, bench.engine, Strategy.CUDA_IPC)  # an unclaimed strategy is refused before anything else
    segment = bytes(64) + struct.pack("<qq", 0, 1 << 40)
    places = bytes(16 * len((await bench.engine.weight_manifest()).tensors))
    await _refuse_source(bench, CudaIpcSource(name="nobody's", gpus=("GPU-0",), segments=segment, places=places))


@case(Capability.WEIGHTS_BROADCAST)
async def a_group_that_was_not_formed_is_refused(bench: Bench) -> None:
    """A broadcast in a group that the engine did not join is refused in time with a typed error and changes nothing."""
    await _refuse_source(bench, BroadcastSource(group_name="nobody"))


async def _refuse_source(bench: Bench, source: WeightSource) -> None:
    engine = bench.engine
    refusals = (InvalidRequest, WeightSyncError, EngineStateError)
    async with unchanged(bench), within():
        request = WeightUpdateRequest(version=NEW, source=source, plan=make_plan([]), digests={})
        with raises(refusals, "an update of no tensor at all"):
            await engine.update_named_weights(request)
        plan = make_plan((await engine.weight_manifest()).tensors, ONE_BUCKET)
        digests = {spec.name: 0 for spec in plan.tensors}
        with raises(refusals, f"a source ({source.kind}) that is not there"):
            await engine.update_named_weights(request.model_copy(update={"plan": plan, "digests": digests}))
        check_state(engine, EngineState.READY)


@case(Capability.WEIGHTS_BROADCAST, own_engine=True, slow=True)
async def a_group_that_nobody_joins_does_not_hang(bench: Bench) -> None:
    """Waiting for a trainer that never joins the group ends in a typed error at its deadline; the engine serves on."""
    engine = bench.create(timeouts={"weight_update": 5})
    WeightSync.connect({}, engine, "broadcast")  # an unclaimed strategy is refused before the engine starts
    spec = CommunicatorSpec(
        master_address="127.0.0.1",
        master_port=free_port(),
        rank_offset=1,
        world_size=2,
        group_name="nobody",
        backend="gloo",
    )
    refusals = (DeadlineExceeded, EngineError, WeightSyncError, InvalidRequest)
    async with engine:
        prompts = bench.prompts(2, engine=engine)
        before = await bench.greedy(prompts, engine=engine)
        async with within():
            with raises(refusals, "a group that nobody else joined"):
                await engine.init_weight_update_communicator(spec)
            with raises(refusals, "leaving a group that never was"):
                await engine.destroy_weight_update_communicator("nobody")
        check_state(engine, EngineState.READY)
        check_same(bench, await bench.greedy(prompts, engine=engine), before, engine)


@case(Capability.WEIGHTS_BROADCAST, changes_weights=True)
async def a_group_is_formed_once_and_left_once(bench: Bench) -> None:
    """A second group of the same name is refused without harming the first; a group can be left only once.

    Nobody listens for members of a group on this machine but at a loopback address.
    """
    between, before = Between(bench.engine), _listening_addresses()
    async with WeightSync.connect(tensors_of(bench.other_weights()), between, "broadcast") as sync:
        await sync.push(version="first")
        (spec,) = between.groups
        if ip_address(spec.master_address).is_loopback:
            exposed = [one for one in _listening_addresses() - before if not ip_address(one.host).is_loopback]
            assert not exposed, f"for a group at {spec.master_address} other hosts can connect to {exposed}"
        with raises(InvalidRequest, "a second group of one name"):
            await bench.engine.init_weight_update_communicator(spec)
        await sync.push(version=NEW)
        assert between.groups == [spec]
    with raises(InvalidRequest, "leaving a group that was left"):
        await bench.engine.destroy_weight_update_communicator(spec.group_name)
    await check_serves(bench, bench.other_weights(), NEW)


@case(Capability.WEIGHTS_SHARED_MEMORY)
async def a_wrong_plan_is_refused_by_the_engine(bench: Bench) -> None:
    """The engine itself checks plan, geometry, digests and arena before it changes anything, whoever sends them."""
    engine = bench.engine
    between = Between(engine)
    async with (
        WeightSync.connect(tensors_of(bench.other_weights()), between, "shared_memory") as sync,
        unchanged(bench),
    ):
        name = a_matrix(await engine.weight_manifest())

        def undigested(request: WeightUpdateRequest) -> WeightUpdateRequest:
            digests = {other: value for other, value in (request.digests or {}).items() if other != name}
            return request.model_copy(update={"digests": digests})

        def short(request: WeightUpdateRequest) -> WeightUpdateRequest:
            return request.model_copy(update={"source": request.source.model_copy(update={"nbytes": 256})})

        between.change = lambda request: without_tensor(request, name)
        with raises(WeightPlanMismatch, "a plan without a tensor") as refusal:
            await sync.push(version="bad")
        assert refusal.error.missing == (name,)
        between.change = lambda request: moved_tensor(request, name)
        with raises(WeightPlanMismatch, "a tensor at an odd place") as refusal:
            await sync.push(version="bad")
        assert refusal.error.mismatched == (name,)
        for change in (undigested, short):
            between.change = change
            with raises(InvalidRequest, change.__name__):
                await sync.push(version="bad")


@dataclass(frozen=True, slots=True)
class _Listening:
    """An address at which a process accepts TCP connections."""

    pid: int
    host: str
    port: int


def _listening_addresses() -> set[_Listening]:
    """Return the TCP addresses at which this process and its descendants listen."""
    me, found = psutil.Process(), set[_Listening]()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found |= {
                _Listening(process.pid, one.laddr.ip, one.laddr.port)
                for one in process.net_connections(kind="tcp")
                if one.status == psutil.CONN_LISTEN
            }
    return found
