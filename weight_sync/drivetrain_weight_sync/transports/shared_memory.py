"""Shared-memory transport: an arena that the trainer's process creates once and the engine's maps once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from drivetrain.types.weights import SharedMemorySource, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import bucket_offsets, plan_nbytes
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender, Slots, check_fit, slot
from drivetrain_weight_sync.transports.shared_arena import Arena, MappedArena


class SharedMemorySender(Sender):
    """Copies each tensor to its place in the arena."""

    release_blocks = False

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._offsets: tuple[int, ...] = ()
        self._slots: dict[str, torch.Tensor] = {}
        self._plan: WeightPlan | None = None

    def begin(self, plan: WeightPlan) -> None:
        """Make the arena, unless the one of the last push has the same plan."""
        if self._arena is not None and self._plan == plan:
            return
        self.close()
        self._arena = arena = Arena(plan_nbytes(plan))
        self._plan, self._offsets = plan, bucket_offsets(plan)
        self._slots = {
            placed.spec.name: slot(arena.memory, offset, placed)
            for bucket, offset in zip(plan.buckets, self._offsets, strict=True)
            for placed in bucket.tensors
        }

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Copy the tensor into the arena."""
        self._slots[name].copy_(tensor)

    def slots(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors' places in the arena."""
        return self._slots

    def source(self) -> SharedMemorySource:
        """Name the arena."""
        assert self._arena is not None
        return SharedMemorySource(path=self._arena.path, nbytes=self._arena.nbytes, bucket_offsets=self._offsets)

    def close(self) -> None:
        """Free the arena."""
        self._slots, self._plan = {}, None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class SharedMemoryReader(Reader):
    """Maps the arena at the first update and keeps it mapped until the sender makes another."""

    def __init__(self) -> None:
        self._mapped: MappedArena | None = None
        self._plan = WeightPlan(())
        self._offsets: tuple[int, ...] = ()

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Map the arena, and check that the plan fits it."""
        source, plan, digests = request.source, request.plan, request.digests
        assert isinstance(source, SharedMemorySource)
        assert plan is not None
        assert digests is not None
        check_fit(source.bucket_offsets, source.nbytes, plan)
        if self._mapped is None or not self._mapped.still(source.path, source.nbytes):
            self._mapped = None
            self._mapped = MappedArena(source.path, source.nbytes)
        self._plan, self._offsets = plan, source.bucket_offsets
        return Opened(plan, digests)

    @property
    def holds(self) -> bool:
        """True: tensors are views of memory that stays where it is."""
        return True

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the arena."""
        assert self._mapped is not None
        slots = Slots(self._mapped.memory)
        for placed in self._plan.buckets[index].tensors:
            yield placed.spec.name, slots.view(self._offsets[index], placed)

    def release(self) -> None:
        """Keep the mapping for the next update."""

    def close(self) -> None:
        """Unmap the arena."""
        self._mapped = None
