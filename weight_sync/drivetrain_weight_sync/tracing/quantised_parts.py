"""Parts of a model that an engine keeps in another form than its loader fills, quantised or packed for its kernels.

What they hold is not a copy of what a trainer has, so an update cannot copy it: it gives a part all tensors that it is
made of, and the engine itself makes its form of them, where that was before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn


class QuantisedParts(ABC):
    """The engine's own way to load such parts anew."""

    @abstractmethod
    def as_loaded(self) -> AbstractContextManager[object]:
        """Make all parts as the loader fills them, without memory; as they were afterwards."""

    @abstractmethod
    def part_of(self, destination: torch.Tensor) -> nn.Module:
        """The part that a tensor belongs to which the loader fills; only within :meth:`as_loaded`."""

    @abstractmethod
    def load(self, parts: Sequence[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
        """Load parts anew from all tensors that they are made of, and convert them; they stay where they are."""


def held_by(part: nn.Module) -> list[torch.Tensor]:
    """What a part computes with."""
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
