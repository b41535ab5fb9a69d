"""Eight-bit weights with one scale for each block, as fp8 checkpoints of DeepSeek-V3's kind hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

_LEAST: Final = 1e-4
"""Smallest magnitude that a block's largest value counts as, so that a block of zeros has a scale."""
_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
_AT_ONCE: Final = 1 << 26
"""Elements whose float32 values are in memory at a time."""


@torch.no_grad()
def quantise_blocks(weight: torch.Tensor, block: Sequence[int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to float8_e4m3fn with the arithmetic of DeepGEMM's ``per_block_cast_to_fp8``.

    Args:
        weight: ``[…, rows, columns]``, of any floating dtype.
        block: Rows and columns of a block; the last ones may be smaller.

    Returns:
        The weight in float8_e4m3fn, and ``weight_scale_inv``: float32, ``[…, blocks of rows, blocks of columns]``.
    """
    rows, columns = weight.shape[-2:]
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    # By a number, torch divides on a GPU as a product with its reciprocal, which differs in the last bit.
    largest = torch.full((), _LARGEST, device=weight.device)
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(*weight.shape[:-2], high, wide, dtype=torch.float32, device=weight.device)
    matrices = weight.reshape(-1, rows, columns)
    step = max(1, _AT_ONCE // (rows * columns))
    for some, into, scale in zip(
        torch.split(matrices, step),
        torch.split(quantised.view(-1, rows, columns), step),
        torch.split(scales.view(-1, high, wide), step),
        strict=True,
    ):
        padded = nn.functional.pad(some.float(), (0, wide * block[1] - columns, 0, high * block[0] - rows))
        blocks = padded.view(-1, high, block[0], wide, block[1])
        found = blocks.abs().amax((2, 4), keepdim=True).clamp_min(_LEAST) / largest
        into.copy_((blocks * (1.0 / found)).view(padded.shape)[:, :rows, :columns])
        scale.copy_(found[:, :, 0, :, 0])
    return quantised, scales
