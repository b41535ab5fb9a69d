"""The places of a bucket's tensors in the memory that receives them."""

from __future__ import annotations

from typing import Final

import torch

from drivetrain_weight_sync.tensors.dtypes import dtype_of, nbytes_of
from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket
from drivetrain_weight_sync.trainer_groups.process_messages import Piece

_ALIGNMENT: Final = 64


class BucketLayout:
    """The broadcasts of a bucket, and the place of each tensor in the memory that receives them.

    Raises:
        WeightPlanMismatch: Torch knows no dtype of a name, so its broadcast cannot be received.
    """

    def __init__(self, bucket: WeightBucket) -> None:
        self._specs = bucket.specs
        self._offsets: list[int] = []
        pieces: list[Piece] = []
        end = chunk = 0
        for index, spec in enumerate(bucket.specs, 1):
            if bucket.chunk_bytes is None:
                end += -end % _ALIGNMENT
                pieces.append(Piece(spec.dtype, spec.shape, end))
            self._offsets.append(end)
            end += nbytes_of(spec)
            if bucket.chunk_bytes is not None and (end - chunk > bucket.chunk_bytes or index == len(bucket.specs)):
                pieces.append(Piece("uint8", (end - chunk,), chunk))
                chunk = end
        self.nbytes = end
        self.pieces = pieces

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in ``memory`` (uint8) by name: views, or a copy where a view would not be aligned."""
        found: dict[str, torch.Tensor] = {}
        for spec, offset in zip(self._specs, self._offsets, strict=True):
            dtype = dtype_of(spec)
            data = memory[offset : offset + nbytes_of(spec)]
            found[spec.name] = (data.clone() if offset % dtype.itemsize else data).view(dtype).view(spec.shape)
        return found
