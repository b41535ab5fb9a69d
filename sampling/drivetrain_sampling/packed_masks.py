"""Packing of the ids that tokens were drawn from: one pass over them on the device, and one copy of the result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain.types.sampling_mask import SamplingMask

_GATHER: Final = 0x0102040810204080


class Packing:
    """Packs rows: the device's part is queued at once, the host's part is done when the rows are read.

    Args:
        kept: True for ids that were left, boolean, shape (rows, vocabulary).
        left: Number of ids left in each row, int32.
    """

    def __init__(self, kept: torch.Tensor, left: NDArray[np.int32]) -> None:
        self._vocabulary = kept.shape[-1]
        self._left = left
        # In the words of drivetrain.types.sampling_mask.form_of:
        excluded, bits = self._vocabulary - left, -(-self._vocabulary // 32)
        self._lengths = np.minimum(np.minimum(left, excluded), bits)
        self._as_bits = self._lengths < np.minimum(left, excluded)
        as_kept = (left <= excluded) & ~self._as_bits
        as_excluded = (left > excluded) & ~self._as_bits & (excluded > 0)
        self._ids = _on_the_way(_ids_of(kept, as_kept, as_excluded, int(self._lengths[~self._as_bits].sum())))
        self._words = _on_the_way(_bits_of(kept[_rows(self._as_bits)])) if self._as_bits.any() else None
        self._there: torch.cuda.Event | None = None
        if kept.is_cuda:
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(kept.device))
        self._packed: list[bytes] | None = None

    def rows(self) -> list[bytes]:
        """Return each row as :func:`pack` does."""
        if self._packed is None:
            if self._there is not None:
                self._there.synchronize()
            self._packed = self._joined()
        return self._packed

    def _joined(self) -> list[bytes]:
        lengths = self._lengths
        payload = np.empty(int(lengths.sum()), dtype="<i4")
        in_bits = np.repeat(self._as_bits, lengths)
        payload[~in_bits] = self._ids.numpy()
        if self._words is not None:
            payload[in_bits] = self._words.numpy().reshape(-1).view("<i4")
        ends = lengths.cumsum()
        heads = np.stack([np.full_like(self._left, self._vocabulary), self._left], axis=-1).reshape(-1)
        packed = np.insert(payload, np.repeat(ends - lengths, 2), heads).tobytes()
        rows: list[bytes] = []
        start = 0
        for end in (4 * (ends + np.arange(2, 2 * len(ends) + 2, 2))).tolist():
            rows.append(packed[start:end])
            start = end
        return rows


def pack(kept: torch.Tensor) -> list[bytes]:
    """Return each row as bytes for :func:`joined`: the vocabulary size, and a position as in ``SamplingMask.packed``.

    Bytes rather than masks, because an object for each row and step would keep Python's garbage collector busy.

    Args:
        kept: True for ids that were left, boolean, shape (rows, vocabulary).
    """
    return Packing(kept, kept.sum(-1, dtype=torch.int32).cpu().numpy()).rows()


def joined(rows: Iterable[bytes]) -> SamplingMask | None:
    """Return the mask of consecutive tokens from what :func:`pack` made of each; None without tokens."""
    given = list(rows)
    if not given:
        return None
    return SamplingMask(int.from_bytes(given[0][:4], "little"), b"".join(one[4:] for one in given))


def _ids_of(kept: torch.Tensor, as_kept: NDArray[np.bool_], as_excluded: NDArray[np.bool_], count: int) -> torch.Tensor:
    """Return ``count`` ids: those left in some rows, and those not left in others, one row after another."""
    as_ids = as_kept | as_excluded
    if not as_ids.any():
        return torch.empty(0, dtype=torch.int32)
    if as_excluded.any():
        kept = kept ^ _column(as_excluded, kept)
    if not as_ids.all():
        kept = kept & _column(as_ids, kept)
    # Their number is known, so this need not wait for a GPU to count them.
    return torch.nonzero_static(kept, size=count)[:, 1].to(torch.int32)


def _column(rows: NDArray[np.bool_], kept: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(kept.device)[:, None]


def _bits_of(kept: torch.Tensor) -> torch.Tensor:
    """Return rows as bytes, four to a word of 32 bits, one row after another."""
    missing = -kept.shape[-1] % 32
    padded = torch.nn.functional.pad(kept, (0, missing)) if missing else kept.contiguous()
    # Eight booleans are one integer of 64 bits; the product has the lowest bit of each in its highest byte.
    gathered = padded.view(torch.uint8).view(torch.int64) * _GATHER
    return ((gathered >> 56) & 0xFF).to(torch.uint8)


def _rows(chosen: NDArray[np.bool_]) -> list[int]:
    rows: list[int] = np.flatnonzero(chosen).tolist()
    return rows


def _on_the_way(values: torch.Tensor) -> torch.Tensor:
    """Return page-locked memory to which a GPU's values are being copied; return a CPU's values as they are."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
