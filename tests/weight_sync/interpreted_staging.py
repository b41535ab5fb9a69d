"""Staging by the trainer, checked and copied by the kernel; run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from drivetrain import EngineConfig
from drivetrain.errors import InvalidWeights, WeightPlanMismatch
from drivetrain.types.weights import TensorSpec, WeightManifest, WeightUpdateRequest
from drivetrain_weight_sync import digests, make_plan
from drivetrain_weight_sync.copying import device_copies
from drivetrain_weight_sync.trainer import staging
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.source import GatheredSource, Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.transports.in_process import InProcessReader, InProcessSender
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender

SHAPES = {"embed": (24, 16), "up": (32, 16), "down": (16, 32)}
MANIFEST = WeightManifest(tuple(TensorSpec(n, "float32", s) for n, s in SHAPES.items()), {"head": "embed"})
Found = tuple[dict[str, int], list[str]]
PLAN = make_plan(MANIFEST.tensors, bucket_bytes=2048)


def weights() -> dict[str, torch.Tensor]:
    """Return tensors that include a tied one, under both names."""
    made = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return {**made, "head": made["embed"]}


class Push:
    """Stages one trainer's tensors into an arena, as if they were on a GPU."""

    def __init__(self) -> None:
        self.sender = SharedMemorySender()
        self.stager = Stager()

    def stage(self, tensors: dict[str, torch.Tensor], *, cast: bool = False, gpu_share: float = 1.0) -> Staged:
        staged = Staged()
        stage(Source(tensors), self.sender, MANIFEST, PLAN, staged, self.stager, cast=cast, gpu_share=gpu_share)
        assert staged.fraction == 1.0
        sent = {name: tensors[name].to(torch.float32) for name in SHAPES}
        assert staged.digests == digests(sent)
        for name, tensor in sent.items():
            assert torch.equal(self.sender.slots()[name], tensor), name
        return staged


def note_what_is_held() -> None:
    """A sender that only notes tensors gets all of them at every push, even if none has moved."""
    sender, stager, tensors = InProcessSender(), Stager(), weights()
    for _ in range(3):
        for name in SHAPES:
            tensors[name].mul_(-1.5)
        known, staged = stager.known, Staged()
        stage(Source(tensors), sender, MANIFEST, PLAN, staged, stager, cast=False)
        assert known is None or stager.known is known
        assert staged.digests == digests({name: tensors[name] for name in SHAPES})
        reader = InProcessReader()
        update = WeightUpdateRequest(version="new", source=sender.source(), plan=PLAN, digests=dict(staged.digests))
        reader.open(update, MANIFEST)
        for index in range(len(PLAN.buckets)):
            for name, tensor in reader.tensors(index):
                assert tensor.data_ptr() == tensors[name].data_ptr()
        sender.release()
    assert stager.known is not None


def stage_buckets_as_they_are_gathered() -> None:
    """Each bucket of a gathered source takes one launch, and may be overwritten once the next one is read."""
    tensors, sender, stager = weights(), SharedMemorySender(), Stager()
    launched: list[list[str | None]] = []
    look = stager.looks

    class Counted(device_copies.Looks):
        def __call__(self, copies: Iterable[device_copies.DeviceCopy], pace: device_copies.Pace | None = None) -> Found:
            made = list(copies)
            launched.append([copy.name for copy in made])
            return look(made, pace)

    stager.looks = Counted()

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for names in (["embed", "head"], ["up", "down"]):
            bucket = {name: tensors[name].clone() for name in names}
            yield bucket
            for tensor in bucket.values():
                tensor.zero_()

    source = GatheredSource(buckets, InMemoryNames(EngineConfig(backend="transformers", model="none")), lambda: tensors)
    for _ in range(2):
        staged = Staged()
        stage(source, sender, MANIFEST, PLAN, staged, stager, cast=False)
        assert staged.fraction == 1.0
        assert staged.digests == digests({name: tensors[name] for name in SHAPES})
        assert all(torch.equal(sender.slots()[name], tensors[name]) for name in SHAPES)
        tensors["up"].mul_(-1.5)
    assert launched == 2 * [["embed", "head"], ["up", "down"]]
    tensors["down"][0, 0] = torch.nan
    with pytest.raises(InvalidWeights, match=r"down \(NaN\)"):
        stage(source, sender, MANIFEST, PLAN, Staged(), stager, cast=False)
    tensors["down"][0, 0], tensors["head"] = 0, tensors["head"] + 1
    with pytest.raises(WeightPlanMismatch, match="head and embed differ"):
        stage(source, sender, MANIFEST, PLAN, Staged(), stager, cast=False)
    sender.close()


def main() -> None:
    staging.reaches = lambda tensor: True  # type: ignore[attr-defined]
    note_what_is_held()
    stage_buckets_as_they_are_gathered()
    push, tensors = Push(), weights()
    push.stage(tensors)
    known = push.stager.known
    assert known is not None
    tensors["up"].mul_(-1.5)
    push.stage(tensors)
    tensors["down"].mul_(-1.5)
    device_copies.PACED_ITEMS = 1  # type: ignore[misc]
    push.stage(tensors, gpu_share=0.9)
    assert push.stager.known is known, "nothing moved: nothing is looked up again"

    tensors["up"][0, 0] = torch.inf
    with pytest.raises(InvalidWeights, match=r"up \(infinite\)"):
        push.stage(tensors)
    tensors["up"][0, 0] = 0
    push.stage(tensors)

    tensors["head"] = tensors["head"].clone()
    push.stage(tensors)
    assert push.stager.known is not known, "a tensor lies elsewhere"
    push.stage(tensors)
    tensors["head"][3, 3] += 1
    with pytest.raises(WeightPlanMismatch, match="head and embed differ"):
        push.stage(tensors)
    tensors["head"][3, 3] = tensors["embed"][3, 3]
    push.stage(tensors)

    push.stage({**tensors, "up": tensors["up"].T.contiguous().T}, cast=False)  # not contiguous: copied by torch
    push.stage({**tensors, "up": tensors["up"].double()}, cast=True)
    push.stage(tensors)
    push.sender.close()
    push.stage(tensors)  # into a new arena
    with pytest.raises(WeightPlanMismatch, match=r"Missing: down"):
        push.stage({name: tensor for name, tensor in tensors.items() if name != "down"})
    print("all equal")


if __name__ == "__main__":
    main()
