# pyright: reportMissingImports=false
"""Torch forms of SGLang's Triton kernels for fp8, which need a GPU: slower, and rounded otherwise in the last bit.

The quantisation of weights to one scale each is SGLang's own, which is written in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def use() -> None:
    """Replace SGLang's kernels in this process."""
    from sglang.srt.layers.quantization import fp8_utils

    try:
        from sglang.kernels.ops.quantization import fp8_kernel
    except ImportError:  # older releases
        from sglang.srt.layers.quantization import fp8_kernel
    vars(fp8_kernel)["_per_token_group_quant_8bit"] = _GroupQuantisation()
    vars(fp8_utils)["w8a8_block_fp8_matmul_triton"] = _block_matmul


class _GroupQuantisation:
    """Stands in for the kernel of that name, and is launched alike; each group of a row has its own scale."""

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    @staticmethod
    def _launch(
        x: torch.Tensor,
        quantised: torch.Tensor,
        scales: torch.Tensor,
        stride: int,
        size: int,
        eps: float,
        *,
        bit8_min: float,
        bit8_max: float,
        **_: object,
    ) -> None:
        groups = x.reshape(-1, size).float()
        found = groups.abs().amax(1, keepdim=True).clamp_min(eps) / bit8_max
        quantised.view(-1, size).copy_((groups * (1.0 / found)).clamp(bit8_min, bit8_max).to(quantised.dtype))
        scales.view(-1, 1).copy_(found)


def _block_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    of_x: torch.Tensor,
    of_weight: torch.Tensor,
    block: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """Multiply by a weight that has a scale for each block; rows of ``x`` have one for each group of columns."""
    rows, columns = weight.shape
    scales = of_weight.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    groups = of_x.repeat_interleave(block[1], -1)[..., :columns]
    return ((x.float() * groups) @ (weight.float() * scales).t()).to(output_dtype)
