"""Tensors that are computed when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor that is computed from others, such as a weight with an adapter merged into it."""

    outline: torch.Tensor
    """Its shape and dtype, on the meta device."""
    compute: Callable[[], torch.Tensor]
    """Returns the values in memory that nothing else writes to; the same values at every call during a push."""
