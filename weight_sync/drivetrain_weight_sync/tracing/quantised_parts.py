"""Parts of a model that an engine quantises or repacks for its kernels after loading.

Their tensors are not copies of the trainer's, so an update cannot copy into them. It passes all checkpoint tensors of a
part to the engine, which converts them in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn


class QuantisedParts(ABC):
    """The engine's own way to reload converted parts."""

    @abstractmethod
    def as_loaded(self) -> AbstractContextManager[object]:
        """Restore, within the context, the parameters that the loader fills, as meta tensors."""

    @abstractmethod
    def part_of(self, destination: torch.Tensor) -> nn.Module:
        """Return the part that owns a tensor filled by the loader; only within :meth:`as_loaded`."""

    @abstractmethod
    def load(self, parts: Sequence[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
        """Reload parts from all their checkpoint tensors and convert them; their tensors keep their addresses."""


def held_by(part: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a part computes with."""
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
