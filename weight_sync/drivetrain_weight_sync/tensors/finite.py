"""Find tensors that hold NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

_CHUNK: Final = 1 << 22


def non_finite(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return ``"NaN"`` or ``"infinite"`` by name for each tensor that holds such a value; {} if all are finite.

    Tensors may be on any device; integers are always finite. Each tensor is read once: its minimum and maximum reveal a
    NaN or an infinity.
    """
    pending: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            pending.setdefault(tensor.device, {})[name] = _extremes(tensor.detach())
    found: dict[str, str] = {}
    for batch in pending.values():
        for name, (low, high) in zip(batch, torch.stack(list(batch.values())).tolist(), strict=True):
            if math.isnan(low) or math.isnan(high):
                found[name] = "NaN"
            elif math.isinf(low) or math.isinf(high):
                found[name] = "infinite"
    return {name: found[name] for name in tensors if name in found}


@torch.no_grad()
def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the least and greatest value as float64 ``[2]`` on the tensor's device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() > 1:
        return torch.stack(torch.aminmax(tensor)).double()
    # torch has no reductions for 8-bit dtypes.
    parts = [torch.stack(torch.aminmax(chunk.float())) for chunk in torch.split(tensor.reshape(-1), _CHUNK)]
    return torch.stack(torch.aminmax(torch.stack(parts))).double()
