"""The ranks' shards of each tensor, and the buckets in which they are gathered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.errors import WeightPlanMismatch
from drivetrain.types.weights import Bucket, TensorSpec
from drivetrain_weight_sync.copying.plan import layer_of, make_plan
from drivetrain_weight_sync.shards.pieces import Piece


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a tensor, and the rank from which it is taken."""

    rank: int
    index: int
    """Index among that rank's pieces."""
    piece: Piece

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.piece.extent)


class Inventory:
    """The parts of every tensor, each from one rank.

    Args:
        offered: The pieces of each rank.
        own: The rank that gathers; its own pieces are preferred.
        bucket_bytes: Most bytes of a bucket; a larger layer gets a bucket of its own.
        gathered_with: Returns the name of a layer for a tensor that must share a bucket with all others of the layer.

    Raises:
        WeightPlanMismatch: ranks disagree about a tensor, or their pieces do not cover it exactly.
    """

    def __init__(
        self,
        offered: Mapping[int, Sequence[Piece]],
        own: int,
        bucket_bytes: int,
        gathered_with: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        """All names of each tensor, by its first."""
        self.specs: dict[str, TensorSpec] = {}
        self.parts: dict[str, list[Part]] = {}
        regions: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for rank in sorted(offered, key=lambda rank: (rank != own, rank)):
            for index, piece in enumerate(offered[rank]):
                name = piece.names[0]
                self._see(rank, piece)
                region = (piece.offset, piece.extent)
                if region not in regions.setdefault(name, set()):
                    regions[name].add(region)
                    self.parts.setdefault(name, []).append(Part(rank, index, piece))
        for name, parts in self.parts.items():
            _require_cover(name, [part.piece for part in parts])
        layers = _layers(self.names.values(), gathered_with)
        plan = make_plan(self.specs.values(), bucket_bytes, lambda name: layers[name])
        self.buckets: tuple[Bucket, ...] = plan.buckets

    def _see(self, rank: int, piece: Piece) -> None:
        name = piece.names[0]
        spec = TensorSpec(name, piece.dtype, piece.shape)
        known = self.specs.setdefault(name, spec)
        if known != spec or self.names.setdefault(name, piece.names) != piece.names:
            raise WeightPlanMismatch(
                f"rank {rank} of the trainer describes {name} as {piece.dtype} {list(piece.shape)}, another rank as "
                f"{known.dtype} {list(known.shape)}; nothing was changed. Give every rank the whole tensor's shape",
                mismatched=[name],
            )


def _layers(tensors: Iterable[Sequence[str]], gathered_with: Callable[[str], str | None]) -> dict[str, str]:
    """Return each tensor's layer by the tensor's first name; tied tensors make one layer of two."""
    joined: dict[str, str] = {}

    def layer(name: str) -> str:
        own = gathered_with(name)
        found = layer_of(name if own is None else f"{own}.")
        while found in joined:
            found = joined[found]
        return found

    for first, *others in tensors:
        for other in others:
            if layer(other) != layer(first):
                joined[layer(other)] = layer(first)
    return {names[0]: layer(names[0]) for names in tensors}


def _require_cover(name: str, pieces: Sequence[Piece]) -> None:
    shape = pieces[0].shape
    covered, whole = sum(math.prod(piece.extent) for piece in pieces), math.prod(shape)
    overlapping = next((pair for pair in itertools.combinations(pieces, 2) if _overlap(*pair)), None)
    if overlapping is not None:
        one, other = overlapping
        fault = f"two overlap: {_told(one)} and {_told(other)}"
    elif covered != whole:
        fault = f"they hold {covered} of its {whole} values: " + ", ".join(map(_told, pieces[:4]))
    else:
        return
    raise WeightPlanMismatch(
        f"the shards of {name} ({list(shape)}) do not make up the tensor; nothing was changed. Over all ranks, {fault}",
        mismatched=[name],
    )


def _overlap(one: Piece, other: Piece) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one.region, other.region, strict=True))


def _told(piece: Piece) -> str:
    return f"{list(piece.extent)} at {list(piece.offset)}"
