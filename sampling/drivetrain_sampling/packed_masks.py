"""Packing of the ids that tokens were drawn from: one pass over them on the device, and one copy of the result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drivetrain.types.sampling_mask import MaskForm, SamplingMask, form_of

_BIT: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)


def pack(kept: torch.Tensor) -> list[SamplingMask]:
    """Return the mask of each row, of one position.

    Args:
        kept: True for ids that were left, boolean, shape (rows, vocabulary).
    """
    vocabulary = kept.shape[-1]
    per_row = kept.sum(-1)
    counts: list[int] = per_row.tolist()
    forms = [form_of(count, vocabulary) for count in counts]
    as_bits = [row for row, (form, _) in enumerate(forms) if form is MaskForm.BITS]
    # The fewer ids of each row are listed: those that were left, or those that were not.
    listed = kept ^ (2 * per_row > vocabulary)[:, None]
    bits = b""
    if as_bits:
        rows = torch.tensor(as_bits, device=kept.device)
        listed[rows] = False
        bits = _bits_of(kept[rows])
    ids = b""
    if len(as_bits) < len(counts) and any(words for _, words in forms):
        ids = _bytes_of(listed.nonzero()[:, 1].to(torch.int32))
    masks: list[SamplingMask] = []
    at_id = at_bit = 0
    for count, (form, words) in zip(counts, forms, strict=True):
        if form is MaskForm.BITS:
            payload = bits[at_bit : (at_bit := at_bit + 4 * words)]
        else:
            payload = ids[at_id : (at_id := at_id + 4 * words)]
        masks.append(SamplingMask(vocabulary, count.to_bytes(4, "little") + payload))
    return masks


def _bits_of(kept: torch.Tensor) -> bytes:
    """Return each row as words of 32 bits."""
    rows, vocabulary = kept.shape
    padded = torch.nn.functional.pad(kept, (0, -vocabulary % 32)).view(rows, -1, 8)
    bit = torch.tensor(_BIT, dtype=torch.uint8, device=kept.device)
    return _bytes_of((padded * bit).sum(-1, dtype=torch.uint8))


def _bytes_of(values: torch.Tensor) -> bytes:
    array = values.cpu().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def encoded(mask: SamplingMask | None) -> bytes | None:
    """Encode a mask of one position for :func:`decoded`, for an engine that carries each token's apart."""
    return None if mask is None else mask.vocab_size.to_bytes(4, "little") + mask.packed


def decoded(positions: Iterable[bytes]) -> SamplingMask | None:
    """Return the mask of consecutive positions that :func:`encoded` made; None without positions."""
    given = list(positions)
    if not given:
        return None
    return SamplingMask(int.from_bytes(given[0][:4], "little"), b"".join(one[4:] for one in given))


__all__ = ["decoded", "encoded", "pack"]
