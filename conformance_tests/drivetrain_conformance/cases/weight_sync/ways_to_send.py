"""Each way to send weights serves them."""

from __future__ import annotations

from drivetrain.types.capability import Capability
from drivetrain_conformance.assertions.common_checks import check_flat_nucleus
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assets.weight_sources import in_bfloat16, tensors_of, write_checkpoint
from drivetrain_conformance.cases.weight_sync.checks import NEW, check_serves, one_by_one
from drivetrain_conformance.cases.weight_sync.pushing import check_a_full_disk_changes_nothing, holds_float32, widened
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import Strategy, WeightInput, WeightSync


@case(Capability.WEIGHTS_IN_PROCESS, changes_weights=True)
async def weights_pushed_in_process_are_served(bench: Bench) -> None:
    """After an in-process push an engine answers as an independent pass over the weights does."""
    await _push_and_serve(bench, Strategy.IN_PROCESS)


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def weights_pushed_through_shared_memory_are_served(bench: Bench) -> None:
    """After a push through shared memory an engine answers as an independent pass over the weights does."""
    await _push_and_serve(bench, Strategy.SHARED_MEMORY)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def weights_pushed_through_a_folder_are_served(bench: Bench) -> None:
    """After a push through a folder an engine answers as an independent pass over the weights does.

    A push that finds the disk full fails; the engine keeps its weights, and no file is left.
    """
    await check_a_full_disk_changes_nothing(bench, Strategy.DISK)
    await _push_and_serve(bench, Strategy.DISK)


@case(Capability.WEIGHTS_CUDA_IPC, changes_weights=True, hardware=Hardware.GPU)
async def weights_pushed_through_gpu_memory_are_served(bench: Bench) -> None:
    """After a push through memory of the same GPU an engine answers as an independent pass over the weights does."""
    tensors = tensors_of(bench.other_weights())
    WeightSync.connect(tensors, bench.engine, Strategy.CUDA_IPC)  # an unclaimed strategy is refused here
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    await _push_and_serve(bench, Strategy.CUDA_IPC, on_gpu)


@case(Capability.WEIGHTS_BROADCAST, changes_weights=True)
async def weights_that_were_broadcast_are_served(bench: Bench) -> None:
    """After a broadcast an engine answers as an independent pass over the weights does."""
    await _push_and_serve(bench, Strategy.BROADCAST)


async def _push_and_serve(bench: Bench, strategy: Strategy, source: WeightInput | None = None) -> None:
    other = bench.other_weights()
    async with WeightSync.connect(tensors_of(other) if source is None else source, bench.engine, strategy) as sync:
        assert sync.strategy is strategy
        result = await sync.push(version=NEW)
    assert (result.version, result.strategy) == (NEW, strategy)
    assert result.nbytes > 0
    assert 0 < result.paused_seconds < result.update_seconds
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def a_checkpoint_folder_is_served(bench: Bench) -> None:
    """After load_weights_from_disk() an engine answers as an independent pass over that folder does.

    An engine that holds float32 also accepts a folder in bfloat16.
    """
    other = bench.other_weights()
    await bench.engine.load_weights_from_disk(str(other), NEW)
    await check_serves(bench, other, NEW)
    if bench.claims(Capability.TOP_P):
        await check_flat_nucleus(bench, other)
    if await holds_float32(bench.engine):
        narrow = in_bfloat16(tensors_of(other))
        folder = write_checkpoint(bench.folder("narrow"), other, narrow)
        await bench.engine.load_weights_from_disk(str(folder), "bfloat16")
        await check_serves(bench, widened(bench, narrow), "bfloat16")


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK, changes_weights=True)
async def auto_picks_a_way_that_works(bench: Bench) -> None:
    """Strategy auto picks one that the engine claims, and its push gives the same answers as any other."""
    engine, other = bench.engine, bench.other_weights()
    old, new, prompts = tensors_of(bench.model), tensors_of(other), bench.prompts(2)
    async with (
        WeightSync.connect(new, engine, "shared_memory") as shared,
        WeightSync.connect(old, engine, "disk") as disk,
        WeightSync.connect(new, engine) as auto,
    ):
        assert auto.strategy is not Strategy.AUTO
        assert f"weights_{auto.strategy.value}" in {capability.value for capability in engine.capabilities}
        before = await one_by_one(bench, prompts)
        await auto.push(version="auto")
        by_auto = await one_by_one(bench, prompts)
        await disk.push(version="disk")
        check_same(bench, await one_by_one(bench, prompts), before)
        await shared.push(version="shared")
        check_same(bench, await one_by_one(bench, prompts), by_auto, model=other)
    await check_serves(bench, other, "shared")
