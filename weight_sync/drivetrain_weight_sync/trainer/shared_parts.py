"""Stage a sharded source without gathering it: each rank holds its own parts where the engine's ranks read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from drivetrain.types.weights import ShardsSource, WeightManifest, WeightPlan
from drivetrain_weight_sync.copying.digest import finished
from drivetrain_weight_sync.shards.gatherer import Gatherer
from drivetrain_weight_sync.shards.links import PartSpec
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.tensors.storages import place_of
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged, nbytes_of_plan, require_finite, require_fit
from drivetrain_weight_sync.trainer.strategy import Strategy
from drivetrain_weight_sync.transports.cuda_ipc import can_read
from drivetrain_weight_sync.transports.shards import FlatPart, name_of, packed

_READ_IN_PLACE: Final = frozenset({Strategy.CUDA_IPC, Strategy.SHARED_MEMORY})


@dataclass(frozen=True, slots=True)
class _Layout:
    """The parts of the plan's tensors by rank."""

    plan: WeightPlan
    outline: Mapping[str, torch.Tensor]
    wholes: list[torch.Tensor]
    """The plan's tensors on the meta device."""
    parts: dict[int, list[FlatPart]]
    """By rank, in the plan's order."""
    wanted: dict[int, tuple[tuple[PartSpec, ...], ...]]
    """The same, by bucket of the plan, as a rank is asked for them."""


class _Held(NamedTuple):
    """Consecutive elements of a tensor of the checkpoint that lie in one shard."""

    rank: int
    shard: int
    """Index among the rank's."""
    first: int
    """Index of the first element in the flattened shard."""
    begin: int
    """The same in the tensor."""
    numel: int


class SharedParts:
    """Stages pushes of one gatherer's ranks. Used by one thread at a time.

    Args:
        gatherer: Reaches the ranks.
        strategy: The push's strategy; only ``cuda_ipc`` and ``shared_memory`` let the engine read memory.
    """

    def __init__(self, gatherer: Gatherer, strategy: Strategy) -> None:
        self._gatherer = gatherer
        self._strategy = strategy
        self._known: _Layout | None = None

    def stage(
        self,
        source: Source,
        manifest: WeightManifest,
        plan: WeightPlan,
        staged: Staged,
        *,
        engines: Sequence[str],
        cast: bool,
        gpu_share: float,
    ) -> ShardsSource | None:
        """Have every rank stage its parts, and fill ``staged``; None if the source must be gathered instead.

        It must if the ranks or the engine are on several hosts or on GPUs that cannot read each other's memory, and if
        a tensor of the trainer or of the checkpoint is cut so that its elements do not lie together in the other's, or
        is computed from others, as weights with adapters are.

        Args:
            source: The gathered source, of which only the outline is read.
            manifest: The engine's manifest.
            plan: The plan.
            staged: Progress and result.
            engines: UUIDs of the engine's GPUs.
            cast: As for ``WeightSync.connect``.
            gpu_share: Share of a GPU's time that copies may take.

        Raises:
            WeightPlanMismatch, InvalidWeights: as :func:`~drivetrain_weight_sync.trainer.staging.stage` does.
            TrainerRankLost, DeadlineExceeded: a rank is gone, or stands still.
        """
        with staged.checking():
            if not self._reachable(engines):
                return None
            outline = source.outline(manifest)
            assert outline is not None
            require_fit(outline, manifest, cast=cast)
            layout = self._layout(outline, manifest, plan)
            if layout is None:
                return None
        with staged.staging():
            staged.nbytes = nbytes_of_plan(plan)
            found = self._gatherer.stage_parts(
                self._strategy.value,
                layout.wanted,
                gpu_share,
                lambda fraction: staged.reached(int(fraction * staged.nbytes)),
            )
            specs = plan.tensors
            sums = [0] * len(specs)
            bad: dict[str, str] = {}
            for rank, parts in layout.parts.items():
                for part, value in zip(parts, found[rank].sums, strict=True):
                    sums[part.tensor] += value
                    strange = found[rank].strange.get(name_of(specs[part.tensor], part))
                    bad |= {specs[part.tensor].name: strange} if strange else {}
            require_finite(bad)
            for spec, whole, value in zip(specs, layout.wholes, sums, strict=True):
                staged.digests[spec.name] = finished(value, whole)
            staged.reached(staged.nbytes)
        ranks = [found[rank].source for rank in layout.parts]
        return ShardsSource.model_validate({"ranks": ranks, "parts": [*map(packed, layout.parts.values())]})

    def _reachable(self, engines: Sequence[str]) -> bool:
        """Return whether the engine can read the memory of every rank."""
        if self._strategy not in _READ_IN_PLACE or not self._gatherer.on_one_host:
            return False
        if self._strategy is Strategy.SHARED_MEMORY:
            return True
        return bool(engines) and all(can_read(engines, gpu) for gpu in self._gatherer.gpus.values())

    def _layout(
        self, outline: Mapping[str, torch.Tensor], manifest: WeightManifest, plan: WeightPlan
    ) -> _Layout | None:
        known = self._known
        if known is not None and known.plan == plan and _same(known.outline, outline):
            return known
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in outline.items():
            if place_of(tensors.setdefault(manifest.aliases.get(name, name), tensor)) != place_of(tensor):
                return None  # tied in the engine and not in the trainer: their values are compared
        parts: dict[int, list[FlatPart]] = {}
        wanted: dict[int, list[list[PartSpec]]] = {}
        index = 0
        for number, bucket in enumerate(plan.buckets):
            for spec in (placed.spec for placed in bucket.tensors):
                held = self._held(tensors[spec.name])
                if held is None:
                    return None
                for rank, shard, first, begin, numel in held:
                    flat = FlatPart(index, begin, numel)
                    asked = PartSpec(
                        shard, first, name_of(spec, flat), spec.dtype, begin * dtype_of(spec).itemsize, numel
                    )
                    parts.setdefault(rank, []).append(flat)
                    wanted.setdefault(rank, [[] for _ in plan.buckets])[number].append(asked)
                index += 1
        frozen = {rank: tuple(map(tuple, buckets)) for rank, buckets in wanted.items()}
        wholes = [torch.empty(spec.shape, dtype=dtype_of(spec), device="meta") for spec in plan.tensors]
        self._known = _Layout(plan, outline, wholes, parts, frozen)
        return self._known

    def _held(self, tensor: torch.Tensor) -> list[_Held] | None:
        """Return where the elements of a tensor of the checkpoint are; None if a part's do not lie together."""
        held = self._gatherer.parts_of(tensor)
        if held is None or not tensor.is_contiguous():
            return None
        found: list[_Held] = []
        begin = int(tensor.storage_offset())
        for part in held:
            first = part.piece.first_element
            if first is None:
                return None
            low, high = max(first, begin), min(first + part.numel, begin + tensor.numel())
            if low < high or not tensor.numel():
                found.append(_Held(part.rank, part.index, low - first, low - begin, high - low))
        return found


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(place_of(tensor) == place_of(other[name]) for name, tensor in one.items())
