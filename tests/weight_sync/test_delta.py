"""A delta carries exactly the changed values, and applies only to the weights it was computed against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weight_sync.models import Model, differing, tensors_of
from tests.weight_sync.receiver_engines import InlineEngine
from tests.weight_sync.test_traced_target import SPLIT, Rank

from drivetrain.errors import (
    InvalidRequest,
    InvalidWeights,
    WeightBaseMismatch,
    WeightTransferFailed,
    WeightVerifyFailed,
)
from drivetrain.types.weights import (
    BeginUpdate,
    CommitUpdate,
    LoadBuckets,
    PluginSource,
    PrepareUpdate,
    TensorSpec,
    VerifyUpdate,
    WeightManifest,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import Receiver, TracedTarget, WeightSync, make_plan
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.transports.base import Patch
from drivetrain_weight_sync.transports.delta import DeltaReader, DeltaSender

UP = "model.layers.1.up.weight"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn]


class Link:
    """A sender, and receivers of ranks that start with zeros."""

    def __init__(self, manifest: WeightManifest, *receivers: Receiver) -> None:
        self.manifest = manifest
        self.plan = make_plan(manifest.tensors)
        self.sender = DeltaSender()
        self.receivers = receivers

    def request(self, tensors: Mapping[str, torch.Tensor]) -> WeightUpdateRequest:
        staged = Staged()
        stage(Source(tensors), self.sender, self.manifest, self.plan, staged, Stager(), cast=False)
        return WeightUpdateRequest(version="v", source=self.sender.source(), plan=self.plan, digests=staged.digests)

    def push(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Push to all receivers; return the number of bytes sent."""
        request = self.request(tensors)
        assert request.digests is not None
        everything = LoadBuckets(tuple(range(len(self.plan.buckets))))
        for receiver in self.receivers:
            for message in (PrepareUpdate(request), BeginUpdate(), everything, VerifyUpdate(), CommitUpdate("v")):
                receiver.handle(message)
        self.sender.committed(request.digests)
        self.sender.release()
        return self.sender.sent_nbytes


def one_tensor(dtype: torch.dtype, size: int) -> tuple[Link, torch.Tensor]:
    """Return a link to an engine that holds one flat tensor, and that tensor."""
    held = torch.zeros(size, dtype=dtype)

    def load_weights(weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            held.copy_(tensor)

    manifest = WeightManifest((TensorSpec("w", str(dtype).removeprefix("torch."), (size,)),))
    return Link(manifest, Receiver(TracedTarget(load_weights, manifest))), held


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return finite numbers of every sign and size."""
    draw = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, (size,), dtype=dtype, generator=draw)
    return torch.randn(size, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_change_arrives_bitwise(dtype: torch.dtype, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 255, 256, 257, 1000]))
    link, held = one_tensor(dtype, size)
    old, new = random_bits(size, dtype, 1), random_bits(size, dtype, 2)
    link.push({"w": old})
    changed = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
    current = old.clone()
    current.view(torch.uint8).view(size, -1)[changed] = new.view(torch.uint8).view(size, -1)[changed]
    link.push({"w": current})
    assert not differing({"w": held}, {"w": current})


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 511, 65_534, 65_535, 65_536, 200_000])
def test_a_step_of_any_length_arrives(gap: int) -> None:
    link, held = one_tensor(torch.bfloat16, 600_001)
    current = torch.zeros(600_001, dtype=torch.bfloat16)
    link.push({"w": current})
    current[gap - 1 :: gap] = 1.0
    link.push({"w": current})
    assert not differing({"w": held}, {"w": current})


def test_minus_zero_is_a_change() -> None:
    link, held = one_tensor(torch.float32, 4)
    link.push({"w": torch.zeros(4)})
    link.push({"w": torch.tensor([0.0, -0.0, 0.0, 0.0])})
    assert torch.signbit(held).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("changed", "most"), [(0.0, 0.001), (0.001, 0.003), (0.01, 0.02), (0.1, 0.16), (1.0, 1.001)])
def test_what_travels_is_little_where_little_changed(changed: float, most: float) -> None:
    size = 1 << 20
    link, held = one_tensor(torch.bfloat16, size)
    old, new = random_bits(size, torch.bfloat16, 1), random_bits(size, torch.bfloat16, 2)
    assert link.push({"w": old}) > 2 * size
    current = torch.where(torch.rand(size, generator=torch.Generator().manual_seed(3)) < changed, new, old)
    assert link.push({"w": current}) < most * 2 * size
    assert not differing({"w": held}, {"w": current})


# The base of a delta --------------------------------------------------------------------------------------------------


async def test_weights_that_came_another_way_are_replaced_whole() -> None:
    trained, other, served = Model(1), Model(3), Model(2)
    engine = InlineEngine(served)
    async with (
        WeightSync.connect(trained, engine, "delta") as delta,
        WeightSync.connect(other, engine, "shared_memory") as shared,
    ):
        whole = (await delta.push(version="1")).sent_nbytes
        assert whole > (await delta.push(version="2")).sent_nbytes
        await shared.push(version="3")
        assert (await delta.push(version="4")).sent_nbytes == whole
        assert not differing(tensors_of(served), tensors_of(trained))
        assert whole > (await delta.push(version="5")).sent_nbytes
    assert engine.version == "5"


async def test_a_generator_is_read_once_though_the_engine_wants_all() -> None:
    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    sources = iter([trained.state_dict().items(), trained.state_dict().items()])
    async with WeightSync.connect(lambda: next(sources), engine, "delta") as sync:
        await sync.push(version="1")
        engine.receiver.forget_held()
        await sync.push(version="2")
    assert not differing(tensors_of(served), tensors_of(trained))


def test_a_delta_against_other_weights_changes_nothing() -> None:
    target = TracedTarget(Rank(0).load_weights, SPLIT, split=True)
    link = Link(SPLIT, Receiver(target))
    weights = {spec.name: torch.randn(spec.shape) for spec in SPLIT.tensors}
    link.push(weights)
    weights["q"][0, 0] += 1
    request = link.request(weights)
    fresh = Rank(0)
    for receiver in (Receiver(TracedTarget(fresh.load_weights, SPLIT, split=True)), link.receivers[0]):
        receiver.forget_held()
        with pytest.raises(WeightBaseMismatch, match="nothing was changed"):
            receiver.handle(PrepareUpdate(request))
    assert not fresh.qk.any()


async def test_after_a_failed_push_every_tensor_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = Model(1), Model(2)
    async with WeightSync.connect(trained, InlineEngine(served), "delta") as sync:
        whole = (await sync.push(version="1")).sent_nbytes
        with torch.no_grad():
            trained.get_parameter(UP).neg_()
        with monkeypatch.context() as broken:
            broken.setattr(DeltaReader, "tensors", lambda *_: iter([("no such tensor", torch.zeros(1))]))
            with pytest.raises(WeightTransferFailed):
                await sync.push(version="2")
        assert (await sync.push(version="3")).sent_nbytes == whole
        assert not differing(tensors_of(served), tensors_of(trained))


async def test_weights_that_are_refused_do_not_cost_the_next_delta() -> None:
    trained, served = Model(1), Model(2)
    source = tensors_of(trained)
    async with WeightSync.connect(source, InlineEngine(served), "delta") as sync:
        whole = (await sync.push(version="1")).sent_nbytes
        good = source[UP]
        source[UP] = torch.full_like(good, torch.nan)
        with pytest.raises(InvalidWeights):
            await sync.push(version="2")
        source[UP] = -good
        assert (await sync.push(version="3")).sent_nbytes < whole
    assert not differing({UP: tensors_of(served)[UP]}, {UP: -good})


@pytest.mark.parametrize("tensor", [UP, "model.norm.weight"])
async def test_what_something_else_changed_is_found_and_mended(tensor: str) -> None:
    trained, served = Model(1), Model(2)
    async with WeightSync.connect(trained, InlineEngine(served), "delta") as sync:
        await sync.push(version="1")
        with torch.no_grad():
            trained.get_parameter(UP)[0, 0] += 1
            served.get_parameter(tensor).view(-1)[-1] += 1
        with pytest.raises(WeightVerifyFailed, match=tensor):
            await sync.push(version="2")
        await sync.push(version="3")
    assert not differing(tensors_of(served), tensors_of(trained))


# Ranks ------------------------------------------------------------------------------------------------------------


def ranks() -> tuple[Link, list[Rank]]:
    both = [Rank(0), Rank(1)]
    return Link(SPLIT, *(Receiver(TracedTarget(rank.load_weights, SPLIT, split=True)) for rank in both)), both


def test_each_rank_changes_its_part() -> None:
    link, both = ranks()
    weights = {spec.name: torch.randn(spec.shape) for spec in SPLIT.tensors}
    link.push(weights)
    for name, place in [("q", 0), ("q", 11), ("k", 3), ("up", 7), ("up", 23), ("up", 8)]:
        weights[name].view(-1)[place] += 1
        link.push(weights)
        expected = Rank(0), Rank(1)
        for rank, one in zip(both, expected, strict=True):
            one.load_weights(weights.items())
            assert torch.equal(rank.qk, one.qk)
            assert torch.equal(rank.up, one.up)


@pytest.mark.parametrize("changed", ["the same", "another"])
@pytest.mark.parametrize("name", ["q", "up"])
def test_a_part_that_something_else_changed_is_found(name: str, changed: str) -> None:
    link, both = ranks()
    weights = {spec.name: torch.randn(spec.shape) for spec in SPLIT.tensors}
    link.push(weights)
    {"q": both[1].qk[0], "up": both[1].up[0]}[name][1] += 1
    weights[name if changed == "the same" else "k"].view(-1)[0] += 1
    with pytest.raises((WeightTransferFailed, WeightVerifyFailed), match=name):
        link.push(weights)


# Refusals ---------------------------------------------------------------------------------------------------------


def spoiled(request: WeightUpdateRequest, **data: object) -> PrepareUpdate:
    assert isinstance(request.source, PluginSource)
    source = request.source.model_copy(update={"data": {**request.source.data, **data}})
    return PrepareUpdate(request.model_copy(update={"source": source}))


def test_a_folder_that_is_not_what_was_written_is_refused() -> None:
    link, held = one_tensor(torch.bfloat16, 16)
    request = link.request({"w": torch.ones(16, dtype=torch.bfloat16)})
    assert isinstance(request.source, PluginSource)
    file = Path(str(request.source.data["folder"])) / "0.safetensors"
    (receiver,) = link.receivers
    wrong: list[tuple[dict[str, object], str]] = [
        ({"folder": "/nowhere"}, "both reach the folder"),
        ({"files": []}, "0 files for a plan of 1"),
        ({"more": 1}, "data of a delta is invalid"),
    ]
    for data, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            receiver.handle(spoiled(request, **data))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InvalidRequest, match="differs from what was written"):
        receiver.handle(PrepareUpdate(request))
    assert not held.any()


def test_a_patch_goes_to_its_positions() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    Patch(torch.tensor([0, 5]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).apply(tensor)
    assert tensor.tolist() == [[1, 0, 0], [0, 0, 2]]
