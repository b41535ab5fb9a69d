"""Updates that copy in one launch; run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pytest
import torch

from drivetrain.errors import WeightVerifyFailed
from drivetrain.types.weights import (
    BeginUpdate,
    CommitUpdate,
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
from drivetrain_weight_sync.transports.in_process import InProcessReader, InProcessSender

buckets = 0
"""Number of buckets of the newest update."""
SHAPES = {"q": (32, 16), "k": (16, 16), "turned": (16, 8), "tied": (24, 16), "odd": (3,)}


class Model:
    """A model with q and k fused, one tensor transposed, one in two places, and one too small for the kernel."""

    def __init__(self) -> None:
        self.qk = torch.zeros(48, 16)
        self.turned = torch.zeros(8, 16)
        self.tied = torch.zeros(24, 16), torch.zeros(24, 16)
        self.odd = torch.zeros(3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "q":
                    self.qk[:32].copy_(tensor)
                case "k":
                    self.qk[32:].copy_(tensor)
                case "turned":
                    self.turned.copy_(tensor.t())
                case "tied":
                    for held in self.tied:
                        held.copy_(tensor)
                case "odd":
                    self.odd.copy_(tensor)


class Misled(Model):
    """A model whose loader puts q where the engine does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere = torch.zeros(32, 16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.elsewhere.copy_(tensor)
            else:
                super().load_weights([(name, tensor)])


class Half:
    """One of two ranks: it takes the upper half of q and the right half of k."""

    def __init__(self) -> None:
        self.q = torch.zeros(16, 16)
        self.k = torch.zeros(16, 8)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.q.copy_(tensor[:16])
            if name == "k":
                self.k.copy_(tensor[:, 8:])


class Watched(TracedTarget):
    """Notes the tensors that are read back; entries of ``answers`` replace what is read."""

    def __init__(self, model: Model | Half, *, split: bool = False) -> None:
        manifest = WeightManifest(tuple(TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()), {})
        super().__init__(model.load_weights, manifest, split=split, at_once=True)
        self.read_back: list[str] = []
        self.answers: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        self.read_back.append(name)
        return self.answers[name] if name in self.answers else super().read(name)


def update(receiver: Receiver, target: Watched, weights: dict[str, torch.Tensor], spoil: str = "") -> None:
    target.read_back.clear()
    global buckets
    plan = make_plan(target.manifest().tensors, bucket_bytes=1024)
    buckets = len(plan.buckets)
    sender = InProcessSender()
    staged = Staged()
    stage(Source(weights), sender, target.manifest(), plan, staged, Stager(), cast=False)
    digests = dict(staged.digests)
    if spoil:
        digests[spoil] ^= 4
    request = WeightUpdateRequest(version="new", source=sender.source(), plan=plan, digests=digests)
    receiver.handle(PrepareUpdate(request))
    receiver.handle(BeginUpdate())
    receiver.handle(LoadBuckets(tuple(range(len(plan.buckets)))))
    receiver.handle(VerifyUpdate())
    receiver.handle(CommitUpdate("new"))


def addresses(reader: InProcessReader) -> Hashable:
    """Return the addresses of the source's tensors."""
    return tuple((name, one.data_ptr()) for index in range(buckets) for name, one in reader.tensors(index))


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def held(model: Model) -> list[torch.Tensor]:
    return [model.qk, model.turned, *model.tied, model.odd]


def same(model: Model, sent: dict[str, torch.Tensor]) -> bool:
    fresh = Model()
    fresh.load_weights(sent.items())
    return all(torch.equal(one, other) for one, other in zip(held(model), held(fresh), strict=True))


def main() -> None:
    InProcessReader.place = property(lambda reader: addresses(reader))  # type: ignore[method-assign,assignment]
    model = Model()
    target = Watched(model)
    receiver = Receiver(target)
    update(receiver, target, weights(1))
    assert same(model, weights(1))
    assert set(target.read_back) == set(SHAPES), "the first update is read back whole"
    update(receiver, target, weights(2))
    assert same(model, weights(2))
    assert set(target.read_back) == {"turned", "odd"}, "what the kernel copied is known to arrive"
    for spoilt in ("k", "turned"):
        with pytest.raises(WeightVerifyFailed) as failed:
            update(receiver, target, weights(3), spoil=spoilt)
        assert list(failed.value.tensors) == [spoilt]
    update(receiver, target, weights(4))
    assert set(target.read_back) == set(SHAPES), "after a failure all is read back again"

    misled = Watched(Misled())
    misled.answers["q"] = torch.zeros(32, 16)  # the tensor that the engine computes with
    with pytest.raises(WeightVerifyFailed) as failed:
        update(Receiver(misled), misled, weights(5))
    assert list(failed.value.tensors) == ["q"], "a copy that leads elsewhere is digested all the same"

    half = Half()
    target = Watched(half, split=True)
    receiver = Receiver(target)
    for number, stays in enumerate((True, True, False, True)):  # one transport with stable addresses, and one without
        InProcessReader.place = property(addresses if stays else lambda _: None)  # type: ignore[method-assign,assignment]
        sent = {name: weights(6 + number)[name] for name in ("q", "k")}
        update(receiver, target, sent)
        assert torch.equal(half.q, sent["q"][:16])
        assert torch.equal(half.k, sent["k"][:, 8:])
        assert set(target.read_back) == (set() if number == 1 else {"q", "k"}), number
    print("all equal")


if __name__ == "__main__":
    main()
