"""The part of each tensor that one rank of a trainer holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.tensors.checkpoint_names import unwrapped
from drivetrain_weight_sync.tensors.dtypes import dtype_name


@dataclass(frozen=True, slots=True, eq=False)
class WeightShard:
    """One rank's part of a checkpoint tensor, for trainers with tensor or pipeline parallelism of their own.

    The shards of all ranks must cover the tensor. Parts that several ranks hold are taken from one of them.
    """

    tensor: torch.Tensor
    """The values: a view of the trainer's parameter where possible, because every shard is kept until the push ends."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, as in the checkpoint."""
    offset: tuple[int, ...]
    """Index of the shard's first element in the whole tensor, in each dimension."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The description of a shard, without its values."""

    names: tuple[str, ...]
    """The tensor's name, followed by the other names of a tied tensor."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    """Shape of the shard."""

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the shard in the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.extent, strict=True))

    @property
    def first_element(self) -> int | None:
        """Index of the shard's first element in the flattened tensor; None if its elements are apart there."""
        begin, cut = 0, False
        for size, offset, extent in zip(self.shape, self.offset, self.extent, strict=True):
            if cut and (offset, extent) != (0, size):
                return None
            begin, cut = begin * size + offset, cut or extent > 1
        return begin


def is_sharded(value: object) -> bool:
    """Return whether a tensor of a source is a DTensor or a :class:`WeightShard`."""
    return isinstance(value, WeightShard) or hasattr(value, "full_tensor")


@torch.no_grad()  # otherwise DTensor.to_local() is an operation to differentiate, which takes longer
def own_pieces(pairs: Iterable[tuple[str, object]]) -> tuple[tuple[Piece, ...], list[torch.Tensor]]:
    """Describe this rank's part of every tensor, and return the parts themselves, in the same order.

    Raises:
        WeightSyncError: a value is no dense tensor with memory, or a shard lies outside its tensor.
    """
    names: dict[int, list[str]] = {}
    values: dict[int, object] = {}
    for name, value in pairs:
        names.setdefault(id(value), []).append(unwrapped(name))
        values[id(value)] = value
    pieces: list[Piece] = []
    tensors: list[torch.Tensor] = []
    offsets: _Offsets = {}
    for key, value in values.items():
        shard = _shard(names[key][0], value, offsets)
        piece = Piece(
            tuple(names[key]), dtype_name(shard.tensor.dtype), shard.shape, shard.offset, tuple(shard.tensor.shape)
        )
        _require_within(piece)
        if shard.tensor.numel() or not math.prod(shard.shape):
            pieces.append(piece)
            tensors.append(shard.tensor)
    return tuple(pieces), tensors


_Offsets = dict[tuple[object, ...], tuple[int, ...]]
"""Offset of this rank's part, by shape, mesh and placements of a DTensor: torch takes 0.1 ms to compute one."""


def _shard(name: str, value: object, offsets: _Offsets) -> WeightShard:
    if isinstance(value, WeightShard):
        shard = WeightShard(value.tensor.detach(), tuple(value.shape), tuple(value.offset))
    elif isinstance(value, torch.Tensor):
        shard = _of_dtensor(name, value, offsets) if is_sharded(value) else _whole(value.detach())
    else:
        raise WeightSyncError(f"{name} is a {type(value).__name__}; give a torch.Tensor, a DTensor or a WeightShard")
    if shard.tensor.is_meta or shard.tensor.layout is not torch.strided:
        raise WeightSyncError(f"{name} is no dense tensor with memory; load the model before the push")
    return shard


def _whole(tensor: torch.Tensor) -> WeightShard:
    return WeightShard(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _of_dtensor(name: str, value: Any, offsets: _Offsets) -> WeightShard:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where = (value.shape, value.device_mesh, value.placements)
    if where not in offsets:
        if any(placement.is_partial() for placement in value.placements):
            raise WeightSyncError(f"{name} is a DTensor with a partial sum; redistribute it to Shard or Replicate")
        offsets[where] = tuple(map(int, compute_local_shape_and_global_offset(*where)[1]))
    local = value.to_local().detach()
    return WeightShard(local, tuple(value.shape), offsets[where] if local.numel() else (0,) * value.dim())


def _require_within(piece: Piece) -> None:
    sizes = (piece.shape, piece.offset, piece.extent)
    inside = len(piece.shape) == len(piece.offset) == len(piece.extent) and all(
        0 <= begin and begin + size <= whole for whole, begin, size in zip(*sizes, strict=True)
    )
    if not inside:
        raise WeightSyncError(
            f"the shard of {piece.names[0]} has shape {list(piece.extent)} at offset {list(piece.offset)}, outside "
            f"its tensor of shape {list(piece.shape)}"
        )
