"""Packing of the ids that tokens were drawn from: one pass over them on the device, and one copy of the result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain.types.sampling_mask import SamplingMask

_GATHER: Final = 0x0102040810204080


def pack(kept: torch.Tensor) -> list[bytes]:
    """Return each row as bytes for :func:`joined`: the vocabulary size, and a position as in ``SamplingMask.packed``.

    Bytes rather than masks, because an object for each row and step would keep Python's garbage collector busy.

    Args:
        kept: True for ids that were left, boolean, shape (rows, vocabulary).
    """
    vocabulary = kept.shape[-1]
    left = _words_of(kept.sum(-1, dtype=torch.int32))
    # In the words of drivetrain.types.sampling_mask.form_of:
    excluded, bits = vocabulary - left, -(-vocabulary // 32)
    lengths = np.minimum(np.minimum(left, excluded), bits)
    as_bits = lengths < np.minimum(left, excluded)
    payload = np.empty(int(lengths.sum()), dtype="<i4")
    in_bits = np.repeat(as_bits, lengths)
    payload[~in_bits] = _ids_of(kept, (left <= excluded) & ~as_bits, (left > excluded) & ~as_bits & (excluded > 0))
    if as_bits.any():
        payload[in_bits] = _bits_of(kept[_rows(as_bits)])
    ends = lengths.cumsum()
    heads = np.stack([np.full_like(left, vocabulary), left], axis=-1).reshape(-1)
    packed = np.insert(payload, np.repeat(ends - lengths, 2), heads).tobytes()
    rows: list[bytes] = []
    start = 0
    for end in (4 * (ends + np.arange(2, 2 * len(ends) + 2, 2))).tolist():
        rows.append(packed[start:end])
        start = end
    return rows


def joined(rows: Iterable[bytes]) -> SamplingMask | None:
    """Return the mask of consecutive tokens from what :func:`pack` made of each; None without tokens."""
    given = list(rows)
    if not given:
        return None
    return SamplingMask(int.from_bytes(given[0][:4], "little"), b"".join(one[4:] for one in given))


def _ids_of(kept: torch.Tensor, as_kept: NDArray[np.bool_], as_excluded: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the ids that were left in some rows, and those that were not in others, one row after another."""
    as_ids = as_kept | as_excluded
    if not as_ids.any():
        return np.empty(0, dtype=np.int32)
    if as_excluded.any():
        kept = kept ^ _column(as_excluded, kept)
    if not as_ids.all():
        kept = kept & _column(as_ids, kept)
    return _words_of(kept.nonzero()[:, 1].to(torch.int32))


def _column(rows: NDArray[np.bool_], kept: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(kept.device)[:, None]


def _bits_of(kept: torch.Tensor) -> NDArray[np.int32]:
    """Return rows as words of 32 bits, one row after another."""
    missing = -kept.shape[-1] % 32
    padded = torch.nn.functional.pad(kept, (0, missing)) if missing else kept.contiguous()
    # Eight booleans are one integer of 64 bits; the product has the lowest bit of each in its highest byte.
    gathered = padded.view(torch.uint8).view(torch.int64) * _GATHER
    packed: NDArray[np.uint8] = ((gathered >> 56) & 0xFF).to(torch.uint8).cpu().numpy()
    return packed.reshape(-1).view("<i4")


def _rows(chosen: NDArray[np.bool_]) -> list[int]:
    rows: list[int] = np.flatnonzero(chosen).tolist()
    return rows


def _words_of(values: torch.Tensor) -> NDArray[np.int32]:
    words: NDArray[np.int32] = values.cpu().numpy()
    return words
