"""A traced loader copies as the loader itself does, and reads back the copied tensors."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from drivetrain.errors import EngineStateError, WeightSyncError, WeightTransferFailed, WeightVerifyFailed
from drivetrain.types.weights import (
    BeginUpdate,
    LoadBuckets,
    PrepareUpdate,
    TensorSpec,
    VerifyUpdate,
    WeightManifest,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import Receiver, make_plan
from drivetrain_weight_sync.tracing.traced_target import TracedTarget
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.transports.in_process import InProcessSender

SHAPES = {"q": (4, 3), "k": (2, 3), "up": (6, 3), "embed": (5, 3), "square": (3, 3), "skipped": (2,)}


class Fused:
    """An engine's model: q and k fused, up and square transposed, embed padded, all in another dtype."""

    def __init__(self) -> None:
        self.qk = torch.zeros(6, 3, dtype=torch.bfloat16)
        self.up = torch.zeros(2, 3, 3, dtype=torch.bfloat16)
        self.embed = torch.zeros(8, 3, dtype=torch.bfloat16)
        self.square = torch.zeros(3, 3, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk[:4].copy_(tensor)
            elif name == "k":
                self.qk[4:].copy_(tensor)
            elif name == "up":
                for half, part in enumerate(tensor.chunk(2)):
                    self.up[half].copy_(part.t())
            elif name == "embed":
                self.embed[:5].copy_(tensor)
            elif name == "square":
                self.square.copy_(tensor.t())


def manifest(**more: tuple[int, ...]) -> WeightManifest:
    shapes = {**SHAPES, **more}
    return WeightManifest(tuple(TensorSpec(n, "float32", s) for n, s in shapes.items()), {"head": "embed"})


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    # Views at an offset, as in an arena.
    arena = torch.randn(200, generator=draw).to(torch.bfloat16)
    found, at = {}, 7
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        found[name] = arena[at : at + count].view(shape)
        at += count
    return found


def test_copies_as_the_loader_does_and_reads_it_back() -> None:
    recorded, loaded = Fused(), Fused()
    target = TracedTarget(recorded.load_weights, manifest())
    assert not recorded.qk.any(), "recording changes nothing"
    weights = tensors()
    loaded.load_weights(weights.items())
    target.load((name, tensor) for name, tensor in weights.items() if name != "skipped")
    for own in ("qk", "up", "embed", "square"):
        assert torch.equal(getattr(recorded, own), getattr(loaded, own)), own
    for name in ("q", "k", "up", "embed", "square", "head"):
        assert torch.equal(target.read(name), weights["embed" if name == "head" else name]), name


def test_the_manifest_is_what_the_loader_takes_in_the_engines_dtype() -> None:
    target = TracedTarget(Fused().load_weights, manifest())
    assert {spec.name: spec.dtype for spec in target.manifest().tensors} == dict.fromkeys(
        ("q", "k", "up", "embed", "square"), "bfloat16"
    )
    assert target.manifest().aliases == {"head": "embed"}


def test_an_unknown_tensor_is_refused() -> None:
    target = TracedTarget(Fused().load_weights, manifest())
    with pytest.raises(WeightTransferFailed, match="nobody"):
        target.load([("nobody", torch.zeros(1))])


def test_memory_that_was_given_back_is_not_written_to() -> None:
    model = Fused()
    target = TracedTarget(model.load_weights, manifest())
    target.check_ready()
    model.qk.untyped_storage().resize_(0)
    with pytest.raises(EngineStateError, match="given back"):
        target.check_ready()


def test_what_is_computed_into_nothing_that_is_known_is_refused() -> None:
    model = Fused()

    def quantise(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            model.embed[:5].copy_((tensor * 2).round())

    with pytest.raises(WeightSyncError, match="computes with embed"):
        TracedTarget(quantise, WeightManifest((TensorSpec("embed", "float32", (5, 3)),)))


def test_a_loader_that_takes_a_part_is_refused() -> None:
    model = Fused()

    def shard(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            model.embed[:2].copy_(tensor[:2])

    with pytest.raises(WeightSyncError, match="parts"):
        TracedTarget(shard, WeightManifest((TensorSpec("embed", "float32", (5, 3)),)))


class Rank:
    """One of two ranks: it takes half of q's rows and of up's columns, and all of k."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.qk = torch.zeros(4, 3)
        self.up = torch.zeros(3, 4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk[:2].copy_(tensor.narrow(0, 2 * self.rank, 2))
            elif name == "k":
                self.qk[2:].copy_(tensor)
            elif name == "up":
                self.up.copy_(tensor.narrow(1, 4 * self.rank, 4))


SPLIT = WeightManifest(tuple(TensorSpec(n, "float32", s) for n, s in {"q": (4, 3), "k": (2, 3), "up": (3, 8)}.items()))


def test_ranks_take_their_parts_and_give_them_back() -> None:
    targets = [TracedTarget(Rank(rank).load_weights, SPLIT, split=True) for rank in range(2)]
    weights = {spec.name: torch.randn(spec.shape) for spec in SPLIT.tensors}
    for target in targets:
        target.load(weights.items())
        assert target.part_of("k", weights["k"]) is None
        assert torch.equal(target.read("k"), weights["k"])
        for name in ("q", "up"):
            part = target.part_of(name, weights[name])
            assert part is not None
            assert part.numel() == weights[name].numel() / 2
            assert torch.equal(target.read(name), part)
    for name, tensor in weights.items():
        assert torch.equal(targets[0].assembled(name, [p for target in targets for p in target.pieces(name)]), tensor)


@pytest.mark.parametrize("spoiled", ["on the way", "in the engine"])
@pytest.mark.parametrize("name", ["q", "k", "up"])
def test_a_part_that_is_not_what_was_sent_is_found(name: str, spoiled: str) -> None:
    weights = {spec.name: torch.randn(spec.shape) for spec in SPLIT.tensors}
    rank = Rank(1)
    receiver = Receiver(TracedTarget(rank.load_weights, SPLIT, split=True))
    plan, sender = make_plan(SPLIT.tensors), InProcessSender()
    staged = Staged()
    stage(Source(weights), sender, SPLIT, plan, staged, Stager(), cast=False)
    request = WeightUpdateRequest(version="v1", source=sender.source(), plan=plan, digests=staged.digests)
    receiver.handle(PrepareUpdate(request))
    receiver.handle(BeginUpdate())
    if spoiled == "on the way":
        weights[name].flatten()[0] += 1  # only rank 1 takes this element of k
    receiver.handle(LoadBuckets((0,)))
    if spoiled == "in the engine":
        {"q": rank.qk[0], "k": rank.qk[2], "up": rank.up[0]}[name][0] += 1
    with pytest.raises(WeightVerifyFailed, match=name) as failure:
        receiver.handle(VerifyUpdate())
    assert failure.value.tensors == (name,)
