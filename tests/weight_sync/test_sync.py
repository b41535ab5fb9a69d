"""A push makes the engine's weights bitwise the trainer's, or changes nothing and says why."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tests.weight_sync.hosted_engine import HostedEngine
from tests.weight_sync.models import Model, differing, tensors_of
from tests.weight_sync.receiver_engines import InlineEngine
from torch import nn

import warm_python
from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import (
    InvalidRequest,
    InvalidWeights,
    UnsupportedCapability,
    WeightPlanMismatch,
    WeightSyncError,
    WeightTransferFailed,
)
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain.types.weights import (
    CudaIpcSource,
    TensorSpec,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import LogprobProbe, Strategy, UpdatableEngine, WeightSync, make_plan
from drivetrain_weight_sync.trainer.source import WeightInput
from drivetrain_weight_sync.transports import cuda_ipc
from drivetrain_weight_sync.transports.broadcast import split_into_calls
from drivetrain_weight_sync.transports.device_memory import Segment

STRATEGIES = ["in_process", "shared_memory", "broadcast", "disk", "delta"]


def reused_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in one buffer, which is overwritten as soon as the next tensor is requested."""
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    for name, tensor in tensors_of(model).items():
        view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        buffer.fill_(255)


SOURCES: dict[str, Callable[[Model], WeightInput]] = {
    "module": lambda model: model,
    "compiled and wrapped": lambda model: nn.ModuleDict({"module": torch.compile(model)}),  # type: ignore[dict-item]
    "mapping": tensors_of,
    "non-contiguous mapping": lambda model: {
        name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in tensors_of(model).items()
    },
    "pairs": lambda model: list(tensors_of(model).items()),
    "function": lambda model: lambda: reused_buffers(model),
    "generator": reused_buffers,
    "without the tied name": lambda model: {n: t for n, t in tensors_of(model).items() if n != "lm_head.weight"},
    "only the tied name": lambda model: {n: t for n, t in tensors_of(model).items() if n != "model.embed.weight"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SOURCES)
async def test_every_source_arrives_bitwise_by_every_strategy(kind: str, strategy: str) -> None:
    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    async with WeightSync.connect(SOURCES[kind](trained), engine, strategy, bucket_bytes=8192) as sync:
        assert differing(tensors_of(served), tensors_of(trained))
        result = await sync.push(version="step-1")
    assert not differing(tensors_of(served), tensors_of(trained))
    assert engine.version == result.version == "step-1"
    assert result.strategy is (Strategy.PLUGIN if strategy == "delta" else Strategy(strategy))
    assert result.buckets > 2
    assert engine.messages.count("LoadBuckets") == 1
    assert result.tensors == len(tensors_of(trained)) - 1
    assert result.nbytes == sum(t.nbytes for n, t in tensors_of(trained).items() if n != "lm_head.weight")
    assert 0 < result.paused_seconds < result.update_seconds < result.total_seconds
    assert result.check_seconds + result.stage_seconds < result.total_seconds
    assert result.gb_per_second > 0


@pytest.mark.parametrize("strategy", ["auto", "broadcast", "disk", "delta"])
async def test_weights_reach_another_process_bitwise_at_every_push(strategy: str) -> None:
    trained = Model(1)
    async with HostedEngine(Model(2)) as engine:
        async with WeightSync.connect(trained, engine, strategy, bucket_bytes=8192) as sync:
            for step in range(3):
                with torch.no_grad():
                    trained.model.layers[1].get_submodule("up").get_parameter("weight").mul_(-1.5)
                await sync.push(version=f"step-{step}")
                assert not differing(await engine.tensors(), tensors_of(trained))
        assert engine.version == "step-2"
        expected = {"auto": Strategy.SHARED_MEMORY, "delta": Strategy.PLUGIN}
        assert sync.strategy is (expected.get(strategy) or Strategy(strategy))


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensor

    return change


def with_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


UP = "model.layers.1.up.weight"
REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], type[Exception], str]] = {
    "missing": (
        without(UP),
        WeightPlanMismatch,
        r"Missing: model\.layers\.1\.up\.weight \(expected bfloat16 \[72, 24\]",
    ),
    "extra": (with_tensor("more", torch.zeros(3)), WeightPlanMismatch, r"Extra: more \(float32 \[3\]\)"),
    "shape": (
        with_tensor(UP, torch.zeros(24, 72).bfloat16()),
        WeightPlanMismatch,
        r"up\.weight \(got bfloat16 \[24, 72\], expected bfloat16 \[72, 24\]\).*the model that is trained",
    ),
    "dtype": (
        with_tensor(UP, torch.zeros(72, 24)),
        WeightPlanMismatch,
        r"float32, which would round to the engine's bfloat16 \(model\.layers\.1\.up\.weight\).*cast=True",
    ),
    "NaN": (with_value(UP, float("nan")), InvalidWeights, r"model\.layers\.1\.up\.weight \(NaN\)"),
    "infinity": (with_value("model.norm.bias", float("-inf")), InvalidWeights, r"model\.norm\.bias \(infinite\)"),
    "0-dim NaN": (with_value("model.layers.0.scale", float("nan")), InvalidWeights, r"model\.layers\.0\.scale \(NaN\)"),
    "tied names that differ": (
        with_value("lm_head.weight", 7.0),
        WeightPlanMismatch,
        r"lm_head\.weight and model\.embed\.weight differ in value",
    ),
    "a tied name of another shape": (
        with_tensor("lm_head.weight", torch.zeros(60, 24).bfloat16()),
        WeightPlanMismatch,
        r"lm_head\.weight",
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", REFUSED)
async def test_bad_weights_are_refused_by_name_before_the_engine_is_asked(
    case: str, streamed: bool, strategy: str
) -> None:
    change, error, message = REFUSED[case]
    trained, served = Model(1), Model(2)
    good, bad, before = tensors_of(trained), tensors_of(trained), tensors_of(served)
    change(bad)
    now: Mapping[str, torch.Tensor] = bad
    engine = InlineEngine(served)

    def pairs() -> Iterable[tuple[str, torch.Tensor]]:
        return now.items()

    async with WeightSync.connect(pairs if streamed else bad, engine, strategy) as sync:
        with pytest.raises(error, match=message):
            await sync.push(version="bad")
        assert engine.messages == []
        assert not differing(tensors_of(served), before)
        now = good
        if not streamed:
            bad.clear()
            bad.update(good)
        await sync.push(version="good")
    assert not differing(tensors_of(served), good)


@pytest.mark.parametrize("most", [0, 3000])
@pytest.mark.parametrize("strategy", ["disk", "delta"])
async def test_a_push_for_which_there_is_no_room_changes_nothing(strategy: str, most: int, tmp_path: Path) -> None:
    trained, served = Model(1), Model(2)
    before, engine = tensors_of(served), InlineEngine(served)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with WeightSync.connect(trained, engine, strategy, directory=tmp_path, bucket_bytes=8192) as sync:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(WeightSyncError, match=r"cannot be written to .*nothing was changed\. Make room"):
                await sync.push(version="step-1")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not differing(tensors_of(served), before)
        assert not engine.messages
        assert not os.listdir(tmp_path)
        await sync.push(version="step-1")
    assert not differing(tensors_of(served), tensors_of(trained))


@pytest.mark.parametrize("strategy", ["disk", "delta"])
async def test_a_folder_that_cannot_be_removed_does_not_change_how_a_push_ends(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(folder: OwnedFolder) -> None:
        raise OSError("the folder is in use")

    trained, served = Model(1), Model(2)
    with monkeypatch.context() as in_use:
        in_use.setattr(OwnedFolder, "remove", busy)
        async with WeightSync.connect(trained, InlineEngine(served), strategy, directory=tmp_path) as sync:
            await sync.push(version="step-1")
    assert not differing(tensors_of(served), tensors_of(trained))
    assert "the folder of a weight push stays: the folder is in use" in caplog.text
    assert os.listdir(tmp_path)
    remove_orphans(tmp_path, "drivetrain-weights-")
    assert not os.listdir(tmp_path), "it was not left to the next push"


@pytest.mark.parametrize("strategy", ["disk", "delta"])
async def test_a_folder_that_cannot_be_made_is_named(strategy: str, tmp_path: Path) -> None:
    async with WeightSync.connect(Model(1), InlineEngine(Model(2)), strategy, directory=tmp_path / "none") as sync:
        with pytest.raises(WeightSyncError, match=r"cannot be written to .*none"):
            await sync.push(version="step-1")


async def test_a_checkpoint_of_another_float_type_is_converted_only_when_asked() -> None:
    trained, served = Model(1), Model(2)
    as_float32 = {n: t.float() if t.is_floating_point() else t for n, t in tensors_of(trained).items()}
    for strategy in STRATEGIES:
        for source in (as_float32, list(as_float32.items())):
            for tensor in served.state_dict().values():
                tensor.zero_()
            async with WeightSync.connect(source, InlineEngine(served), strategy, cast=True) as sync:
                await sync.push(version="v")
            assert not differing(tensors_of(served), tensors_of(trained))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversion_that_keeps_every_value_is_made_unasked(strategy: str, streamed: bool) -> None:
    trained, served = tensors_of(Model(1)), Model(2)
    gates = [name for name, tensor in trained.items() if tensor.dtype is torch.float32]
    trained |= {name: trained[name].bfloat16() for name in gates}
    assert gates
    source = trained if not streamed else list(trained.items())
    async with WeightSync.connect(source, InlineEngine(served), strategy) as sync:
        for _ in range(2):
            await sync.push(version="v")
    held = tensors_of(served)
    assert not differing(held, {**trained, **{name: trained[name].float() for name in gates}})


async def test_a_conversion_that_overflows_is_refused() -> None:
    tensors = tensors_of(Model(1))
    tensors["model.layers.2.down.weight"] = torch.full((24, 72), 1e6)
    async with WeightSync.connect(tensors, InlineEngine(Model(2)), cast=True) as sync:
        with pytest.raises(InvalidWeights, match=r"model\.layers\.2\.down\.weight \(infinite\)"):
            await sync.push(version="v")


async def test_a_cast_does_not_make_integers_of_floats() -> None:
    tensors = tensors_of(Model(1))
    tensors["model.layers.2.codes"] = tensors["model.layers.2.codes"].float()
    async with WeightSync.connect(tensors, InlineEngine(Model(2)), cast=True) as sync:
        with pytest.raises(WeightPlanMismatch, match=r"model\.layers\.2\.codes \(got float32"):
            await sync.push(version="v")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, 2, device="meta"), "on the meta device"),
        (lambda: torch.zeros(2, 2).to_sparse(), "to_dense"),
        (lambda: [1.0], "is a list; give a torch.Tensor"),
    ],
)
async def test_what_is_not_a_plain_tensor_is_refused(make: Callable[[], torch.Tensor], message: str) -> None:
    engine = InlineEngine(Model(2))
    async with WeightSync.connect({"model.norm.weight": make()}, engine) as sync:
        with pytest.raises(WeightSyncError, match=message):
            await sync.push(version="v")


async def test_a_generator_can_be_pushed_once_and_a_function_again() -> None:
    trained, served = Model(1), Model(2)
    async with WeightSync.connect(reused_buffers(trained), InlineEngine(served)) as sync:
        await sync.push(version="one")
        with pytest.raises(WeightSyncError, match="pass a function"):
            await sync.push(version="two")
    async with WeightSync.connect(lambda: reused_buffers(trained), InlineEngine(served)) as sync:
        await sync.push(version="one")
        await sync.push(version="two")


@pytest.mark.parametrize("given", [3, None])
def test_what_is_not_a_source_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="give a torch module") as caught:
        WeightSync.connect(given, InlineEngine(Model(0)))  # type: ignore[arg-type]
    assert caught.value.field == "source"


WRONG_ARGUMENTS: dict[str, list[object]] = {
    "bucket_bytes": [0, -1, 1.5, "5", True, 10**400],
    "staging_share": [0, 1.5, True, "1", float("nan"), None],
    "strategy": [{}, 5, "x" * 5000, "delta\0"],
    "group_backend": ["mpi", [], None],
    "mode": ["stop", 5, {}],
    "master_address": ["", 5, "a\0b"],
    "directory": [5, "", "a\0b"],
    "probe": [5, object()],
    "engine": [5, "engine"],
    "cast": [1, "yes"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_ARGUMENTS.items() for value in values]
)
def test_each_argument_of_connect_is_checked_by_name(field: str, value: object) -> None:
    given: dict[str, object] = {"engine": InlineEngine(Model(0)), field: value}
    with pytest.raises(InvalidRequest, match=field) as caught:
        WeightSync.connect({}, **given)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000


def test_a_directory_is_a_path_or_its_text(tmp_path: Path) -> None:
    for directory in (tmp_path, str(tmp_path)):
        assert isinstance(WeightSync.connect({}, InlineEngine(Model(0)), "disk", directory=directory), WeightSync)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sequences": value} for value in (5, [], [5], ["ab"], [[1]], [[1, -1]], [[1, 2**31]])),
        *({"tolerance": value} for value in (0, "1", True, float("nan"), float("inf"))),
        {"logprobs": 5},
    ],
)
def test_a_probe_is_checked_before_a_push_needs_it(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LogprobProbe(**{"sequences": [[1, 2]], "logprobs": list, "tolerance": 0.1, **wrong})  # type: ignore[arg-type]
    assert caught.value.field.startswith(f"probe.{next(iter(wrong))}")


def test_connect_refuses_what_cannot_work() -> None:
    engine = InlineEngine(Model(0))
    with pytest.raises(InvalidRequest, match="'telepathy'; give one of auto, in_process"):
        WeightSync.connect({}, engine, "telepathy")
    for plugin in ("plugin", Strategy.PLUGIN):
        with pytest.raises(InvalidRequest, match=r"give one of .*delta"):
            WeightSync.connect({}, engine, plugin)
    with pytest.raises(UnsupportedCapability, match="cuda_ipc") as caught:
        WeightSync.connect({}, engine, "cuda_ipc")
    assert caught.value.capability == "weights_cuda_ipc"
    engine.isolation = Isolation.PROCESS
    with pytest.raises(UnsupportedCapability, match="it can take: shared_memory, broadcast, disk"):
        WeightSync.connect({}, engine, "in_process")
    engine.capabilities = frozenset({Capability.STREAMING})
    with pytest.raises(UnsupportedCapability):
        WeightSync.connect({}, engine)


@pytest.mark.parametrize(
    ("isolation", "claimed", "chosen"),
    [
        (Isolation.INLINE, ["weights_in_process", "weights_shared_memory", "weights_disk"], Strategy.IN_PROCESS),
        (Isolation.INLINE, ["weights_shared_memory", "weights_disk"], Strategy.SHARED_MEMORY),
        (Isolation.PROCESS, ["weights_in_process", "weights_shared_memory", "weights_disk"], Strategy.SHARED_MEMORY),
        (Isolation.PROCESS, ["weights_broadcast", "weights_disk"], Strategy.BROADCAST),
        (Isolation.PROCESS, ["weights_cuda_ipc", "weights_shared_memory"], Strategy.SHARED_MEMORY),
        (Isolation.PROCESS, ["weights_disk"], Strategy.DISK),
    ],
)
def test_auto_takes_the_fastest_way_that_the_engine_claims(
    isolation: Isolation, claimed: list[str], chosen: Strategy
) -> None:
    engine = InlineEngine(Model(0))
    engine.isolation = isolation
    engine.capabilities = frozenset(c for c in Capability if c.value in claimed)
    assert WeightSync.connect({}, engine).strategy is chosen


@pytest.mark.parametrize(
    ("engines", "visible", "mapped"),
    [
        (["GPU-0"], 8, True),
        (["GPU-1"], 8, True),
        (["GPU-5"], 8, False),
        (["GPU-0", "GPU-1"], 8, True),
        (["GPU-0", "GPU-1", "GPU-5"], 8, False),
        (["GPU-0", "GPU-9"], 8, False),
        ([], 1, True),
        ([], 8, False),
    ],
)
def test_an_engine_maps_memory_of_the_trainers_gpu_if_it_is_there_or_linked_to_it(
    monkeypatch: pytest.MonkeyPatch, engines: list[str], visible: int, mapped: bool
) -> None:
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    # The first four GPUs are linked to each other.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < 4 and other < 4)
    assert cuda_ipc.can_map(torch.device("cuda", 0), engines) is mapped
    assert not cuda_ipc.can_map(None, engines), "the tensors are on no GPU"


def test_only_tensors_that_stay_on_a_gpu_are_shared() -> None:
    engine = InlineEngine(Model(0))
    with pytest.raises(InvalidRequest, match="strategy 'in_process'") as caught:
        WeightSync.connect({}, engine, share_tensors=True)
    assert caught.value.field == "share_tensors"
    engine.isolation = Isolation.PROCESS
    engine.capabilities = frozenset({Capability.WEIGHTS_CUDA_IPC})
    with pytest.raises(InvalidRequest, match="read again at every push"):
        WeightSync.connect([], engine, "cuda_ipc", share_tensors=True)


def test_tensors_that_cannot_be_shared_are_named() -> None:
    sender = cuda_ipc.CudaIpcInPlaceSender()
    specs = (TensorSpec("a", "float32", (4,)), TensorSpec("b", "bfloat16", (4,)))
    sender.begin(make_plan(specs))
    sender.put("a", torch.zeros(4), held=False)
    sender.put("b", torch.zeros(4), held=True)
    with pytest.raises(InvalidRequest, match=r"a \(streamed\), b \(on cpu\); nothing was changed") as caught:
        sender.source()
    assert caught.value.field == "share_tensors"


def test_memory_that_was_given_back_is_named_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = [0]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"segment.all.freed": freed[0]})
    monkeypatch.setattr(cuda_ipc, "segment_of", lambda pointer, device: (pointer // 1000 * 1000, 1000))
    monkeypatch.setattr(cuda_ipc, "handle_of", lambda pointer, device: bytes(64))
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: f"GPU-{device.index}")

    class OnGpu:
        is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 0)

        def __init__(self, address: int) -> None:
            self.data_ptr = lambda: address

        def is_contiguous(self) -> bool:
            return True

    sender = cuda_ipc.CudaIpcInPlaceSender()
    plan = make_plan([TensorSpec(name, "float32", (4,)) for name in "abc"])

    def source(*addresses: int) -> CudaIpcSource:
        sender.begin(plan)
        for name, address in zip("abc", addresses, strict=True):
            sender.put(name, OnGpu(address), held=True)  # type: ignore[arg-type]
        return sender.source()

    first = source(1000, 2016, 1512)
    assert [segment.nbytes for segment in cuda_ipc.segments_of(first)] == [1000, 1000]
    assert cuda_ipc.places_in(first, plan) == {"a": (0, 0), "b": (1, 16), "c": (0, 512)}
    assert source(1000, 2016, 1512) is first
    assert sender.source() is first, "nothing needs to be put again"
    moved = source(1000, 2016, 3000)
    assert moved.name != first.name
    assert len(cuda_ipc.segments_of(moved)) == 3
    freed[0] += 1
    another = sender.source()
    assert another.name != moved.name
    assert sender.source() is another
    sender.forget()
    assert sender.source().name != another.name, "a push failed"


PLACED = make_plan((TensorSpec("a", "float32", (4,)), TensorSpec("b", "bfloat16", (8,))))
SEGMENTS = [Segment(b"a" * 63 + b"\0", "GPU-0", 64), Segment(bytes(64), "GPU-1", 16)]


def test_tensors_lie_in_the_segments_of_a_source() -> None:
    source = cuda_ipc.source_of(SEGMENTS, [(0, 48), (1, 0)])
    assert cuda_ipc.places_in(source, PLACED) == {"a": (0, 48), "b": (1, 0)}
    assert cuda_ipc.segments_of(source) == SEGMENTS
    assert source.name != cuda_ipc.source_of(SEGMENTS, [(0, 48), (1, 0)]).name


def test_memory_that_comes_back_elsewhere_is_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapped:
        def __init__(self, segment: Segment, device: torch.device) -> None:
            self.memory = torch.empty(segment.nbytes, dtype=torch.uint8)
            mapped.append(self)  # keep it, so that no two share an address

        def close(self) -> None: ...

    mapped: list[Mapped] = []
    monkeypatch.setattr(cuda_ipc, "MappedSegment", Mapped)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    source = cuda_ipc.source_of(SEGMENTS, [(0, 48), (1, 0)])
    request = WeightUpdateRequest(version="v", source=source, plan=PLACED, digests={"a": 0, "b": 0})
    reader = cuda_ipc.CudaIpcReader()
    reader.open(request, WeightManifest(PLACED.tensors))
    place = reader.place
    reader.open(request, WeightManifest(PLACED.tensors))
    assert reader.place == place
    assert len(mapped) == len(SEGMENTS), "it stays mapped"
    reader.close()
    reader.open(request, WeightManifest(PLACED.tensors))
    assert reader.place != place


@pytest.mark.parametrize(
    "places", [[(0, 48)], [(0, 0), (1, 2)], [(0, 0), (2, 0)], [(0, 0), (-1, 0)], [(0, -16), (1, 0)], [(0, 2), (1, 0)]]
)
def test_tensors_outside_of_the_segments_are_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        cuda_ipc.places_in(cuda_ipc.source_of(SEGMENTS, places), PLACED)
    assert caught.value.field == "source.places"


@pytest.mark.parametrize(
    "segments",
    [bytes(79), bytes(64) + struct.pack("<qq", 1, 64), bytes(64) + struct.pack("<qq", -1, 64), bytes(72) + b"\xff" * 8],
    ids=["not whole", "of another GPU", "of no GPU", "of less than nothing"],
)
def test_segments_that_are_none_are_refused(segments: bytes) -> None:
    source = cuda_ipc.source_of(SEGMENTS[:1], [(0, 0), (0, 16)]).model_copy(update={"segments": segments})
    with pytest.raises(InvalidRequest) as caught:
        cuda_ipc.places_in(source, PLACED)
    assert caught.value.field == "source.segments"


@pytest.mark.parametrize(
    ("most", "together"),
    [(1, [[0], [1], [2]]), (512, [[0, 1], [2]]), (767, [[0, 1], [2]]), (768, [[0, 1, 2]])],
)
def test_buckets_are_broadcast_in_calls_of_so_many_bytes(most: int, together: list[list[int]]) -> None:
    plan = make_plan([TensorSpec(f"layers.{index}.a", "float32", (4,)) for index in range(3)], bucket_bytes=256)
    assert list(split_into_calls(plan, most)) == together


async def test_an_empty_version_is_refused_before_any_work() -> None:
    engine = InlineEngine(Model(2))
    async with WeightSync.connect(Model(1), engine) as sync:
        with pytest.raises(InvalidRequest) as caught:
            await sync.push(version="")
    assert caught.value.field == "version"
    assert engine.messages == []


async def test_a_closed_sync_refuses() -> None:
    sync = WeightSync.connect(Model(1), InlineEngine(Model(2)))
    await sync.close()
    await sync.close()
    with pytest.raises(WeightSyncError, match="closed"):
        await sync.push(version="v")


_A_SENDER_THAT_IS_KILLED = """
import os, signal, sys, tests.weight_sync.models as models
from pathlib import Path
from drivetrain_weight_sync.copying.plan import make_plan
from drivetrain_weight_sync.receiver.weight_target import ModuleTarget
from drivetrain_weight_sync.transports.disk import DiskSender
model = models.Model(1)
sender = DiskSender(Path(sys.argv[1]))
sender.begin(make_plan(ModuleTarget(model).manifest().tensors, 8192))
for name, tensor in list(models.tensors_of(model).items())[:-1]:
    if name in sender._bucket_of:
        sender.put(name, tensor, held=True)
os.kill(os.getpid(), signal.SIGKILL if len(sys.argv) == 2 else signal.SIGSTOP)
"""


def test_what_a_killed_sender_left_on_disk_goes_with_the_next_push(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), *sys.path]))
    program = ["-c", _A_SENDER_THAT_IS_KILLED, str(tmp_path)]

    async def push() -> None:
        async with WeightSync.connect(Model(1), InlineEngine(Model(2)), "disk", directory=tmp_path) as sync:
            await sync.push(version="v")

    assert warm_python.run(*program, env=environment).returncode == -signal.SIGKILL
    (orphan,) = files_in(tmp_path)
    with subprocess.Popen([sys.executable, *program, "frozen"], env=environment) as frozen:
        os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)
        assert not orphan.exists()
        (kept,) = files_in(tmp_path)
        asyncio.run(push())
        assert files_in(tmp_path) == [kept], "a sender that is alive keeps its folder"
        frozen.kill()
    asyncio.run(push())
    assert files_in(tmp_path) == []


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


class FlakyEngine(InlineEngine):
    """An engine that fails once, at a given message."""

    fail_at = ""

    async def receive(self, message: WeightMessage) -> WeightReply:
        if type(message).__name__ == self.fail_at:
            self.fail_at = ""
            raise WeightTransferFailed("the line is down")
        return await super().receive(message)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fail_at", ["PrepareUpdate", "BeginUpdate", "LoadBuckets", "VerifyUpdate", "CommitUpdate"])
async def test_after_any_failure_the_next_push_just_works(fail_at: str, strategy: str, tmp_path: Path) -> None:
    trained, served = Model(1), Model(2)
    engine = FlakyEngine(served)
    engine.fail_at = fail_at
    async with WeightSync.connect(trained, engine, strategy, directory=tmp_path) as sync:
        with pytest.raises(WeightTransferFailed, match="line is down"):
            await sync.push(version="one")
        assert engine.version == "initial"
        assert files_in(tmp_path) == []
        await sync.push(version="two")
    assert engine.version == "two"
    assert not differing(tensors_of(served), tensors_of(trained))


async def test_a_push_to_an_engine_with_another_model_agrees_anew_after_one_refusal() -> None:
    small, large = Model(1, layers=2), Model(1, layers=3)
    engine = InlineEngine(Model(2, layers=2))
    source = dict(tensors_of(small))
    async with WeightSync.connect(source, engine, "shared_memory") as sync:
        await sync.push(version="one")
        served = Model(3, layers=3)
        engine.__init__(served)  # type: ignore[misc]
        source.update(tensors_of(large))
        with pytest.raises(WeightPlanMismatch):
            await sync.push(version="two")
        await sync.push(version="two")
    assert not differing(tensors_of(served), tensors_of(large))


async def test_two_pushes_at_once_wait_for_each_other() -> None:
    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    async with WeightSync.connect(trained, engine, "shared_memory", bucket_bytes=8192) as sync:
        await asyncio.gather(*(sync.push(version=f"v{i}") for i in range(4)))
    assert engine.messages.pop() == "ReleaseSources"
    one = engine.messages[: len(engine.messages) // 4]
    assert one[0] == "PrepareUpdate"
    assert one[-1] == "CommitUpdate"
    assert engine.messages == one * 4
    assert not differing(tensors_of(served), tensors_of(trained))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_transfer_is_staged_while_nothing_changes_and_then_applied(strategy: str) -> None:
    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    before = {name: tensor.clone() for name, tensor in tensors_of(served).items()}
    async with WeightSync.connect(trained, engine, strategy, bucket_bytes=8192) as sync:
        handle = await sync.start_weight_transfer(version="one")
        with pytest.raises(WeightSyncError, match="'one' was neither finished nor cancelled"):
            await sync.push(version="two")
        with pytest.raises(WeightSyncError, match="'one' was neither finished nor cancelled"):
            await sync.start_weight_transfer(version="two")
        await handle.wait()
        assert handle.staged
        assert handle.progress == 1.0
        assert not handle.over
        assert engine.version == "initial"
        assert not differing(tensors_of(served), before)
        assert "BeginUpdate" not in engine.messages
        result = await handle.finish()
        assert (result.version, engine.version) == ("one", "one")
        assert not differing(tensors_of(served), tensors_of(trained))
        with pytest.raises(WeightSyncError, match="'one' was finished"):
            await handle.finish()
        await sync.push(version="two")
    assert engine.version == "two"


@pytest.mark.parametrize("strategy", ["shared_memory", "disk", "delta"])
async def test_what_is_staged_is_applied_whatever_becomes_of_the_source(strategy: str) -> None:
    trained, served = Model(1), Model(2)
    sent = {name: tensor.clone() for name, tensor in tensors_of(trained).items()}
    async with WeightSync.connect(trained, InlineEngine(served), strategy) as sync:
        handle = await sync.start_weight_transfer(version="one")
        await handle.wait()
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.zero_()
        await handle.finish()
    assert not differing(tensors_of(served), sent)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("staged", [False, True])
async def test_a_cancelled_transfer_changes_nothing_and_the_next_push_works(strategy: str, staged: bool) -> None:
    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    before = {name: tensor.clone() for name, tensor in tensors_of(served).items()}
    async with WeightSync.connect(trained, engine, strategy) as sync:
        handle = await sync.start_weight_transfer(version="one")
        if staged:
            await handle.wait()
        await handle.cancel()
        await handle.cancel()
        assert handle.over
        assert not handle.staged
        with pytest.raises(WeightSyncError, match="cancelled"):
            await handle.finish()
        assert not differing(tensors_of(served), before)
        await sync.push(version="two")
    assert engine.version == "two"
    assert not differing(tensors_of(served), tensors_of(trained))


async def test_a_transfer_of_wrong_weights_fails_at_its_handle_and_is_over() -> None:
    trained, served = Model(1), Model(2)
    source = dict(tensors_of(trained))
    name = "model.layers.0.up.weight"
    async with WeightSync.connect(source, InlineEngine(served), "shared_memory") as sync:
        source[name] = torch.full_like(source[name], torch.nan)
        handle = await sync.start_weight_transfer(version="one")
        with pytest.raises(InvalidWeights, match=name):
            await handle.finish()
        assert handle.over
        source[name] = tensors_of(trained)[name]
        await sync.push(version="two")


async def test_closing_cancels_a_transfer() -> None:
    sync = WeightSync.connect(Model(1), InlineEngine(Model(2)), "shared_memory")
    handle = await sync.start_weight_transfer(version="one")
    await sync.close()
    assert handle.over


async def test_a_cancelled_push_leaves_nothing_running_and_the_next_works() -> None:
    trained, served = Model(1), Model(2)
    reads: list[str] = []
    reached, given_up = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(trained).items():
            reads.append(name)
            if len(reads) == 3:
                reached.set()
                assert given_up.wait(60)
            yield name, tensor

    async with WeightSync.connect(slowly, InlineEngine(served), "shared_memory") as sync:
        push = asyncio.create_task(sync.push(version="one"))
        assert await asyncio.to_thread(reached.wait, 60)
        push.cancel()
        await asyncio.sleep(0)
        given_up.set()
        with pytest.raises(asyncio.CancelledError):
            await push
        read = len(reads)
        assert read < len(tensors_of(trained))
        await asyncio.sleep(0.05)
        assert len(reads) == read
        await sync.push(version="two")
    assert not differing(tensors_of(served), tensors_of(trained))


async def test_the_event_loop_turns_while_weights_are_read_and_checked() -> None:
    model = Model(1)
    reading, turned = threading.Event(), threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        reading.set()
        assert turned.wait(30), "the event loop stood still"
        yield from Model(2).state_dict().items()

    async def turn() -> None:
        while not reading.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)
        turned.set()

    turning = asyncio.create_task(turn())
    async with WeightSync.connect(source, InlineEngine(model), "shared_memory") as sync:
        await sync.push(version="v")
    await turning


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_fifty_pushes_leak_no_descriptor_mapping_or_file(strategy: str, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def let_groups_end(expected: int) -> None:
        ends = time.monotonic() + 60
        while descriptors() != expected and time.monotonic() < ends:
            time.sleep(0.01)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("drivetrain-weights")

    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    async with WeightSync.connect(trained, engine, strategy, directory=tmp_path) as sync:
        await sync.push(version="first")  # creates what a process creates once
    engine.receiver.close()
    gc.collect()  # engines of earlier tests
    await asyncio.to_thread(time.sleep, 0.5)
    at_first, mapped_at_first = descriptors(), mappings()
    async with WeightSync.connect(trained, engine, strategy, directory=tmp_path) as sync:
        await sync.push(version="0")
        before, mapped = descriptors(), mappings()
        for step in range(50):
            await sync.push(version=str(step))
        assert descriptors() == before
        assert mappings() == mapped
    engine.receiver.close()
    await asyncio.to_thread(let_groups_end, at_first)
    assert descriptors() == at_first
    assert mappings() == mapped_at_first
    assert files_in(tmp_path) == []


def test_the_engine_page_is_what_weight_sync_needs() -> None:
    def accepts(engine: InferenceEngine) -> UpdatableEngine:
        return engine

    assert accepts.__annotations__


@pytest.mark.parametrize(
    "gives", [[[1]], [5], ["ab"], "abc", [(1, torch.zeros(1))], {1: torch.zeros(1)}, torch.zeros(2)]
)
async def test_a_source_gives_pairs_of_a_name_and_a_tensor(gives: object) -> None:
    for given in (gives, lambda: gives):
        async with WeightSync.connect(given, InlineEngine(Model(0))) as sync:  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match=r"source yields .*expected") as caught:
                await sync.push(version="v")
        assert caught.value.field == "source"


async def test_a_function_that_gives_nothing_is_named() -> None:
    async with WeightSync.connect(lambda: None, InlineEngine(Model(0))) as sync:  # type: ignore[arg-type, return-value]
        with pytest.raises(InvalidRequest, match="source yields None"):
            await sync.push(version="v")
