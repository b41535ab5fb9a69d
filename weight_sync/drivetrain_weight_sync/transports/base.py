"""The two ends of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from drivetrain.weights import WeightManifest, WeightPlan, WeightSource, WeightUpdateRequest


class Sender(ABC):
    """The trainer's end: takes the tensors of one push at a time. Used by one thread at a time."""

    @abstractmethod
    def begin(self, plan: WeightPlan) -> None:
        """Make ready to take every tensor of ``plan``. An earlier push, finished or not, is forgotten."""

    @abstractmethod
    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Take one tensor of the plan, in its shape, converting its dtype if it has another.

        ``held`` says that the tensor stays as it is until the push is over; else its memory may change after this.
        """

    @abstractmethod
    def source(self) -> WeightSource:
        """Say where the tensors lie, now that all were put."""

    @abstractmethod
    def release(self) -> None:
        """The push is over, well or not: let go of what only it needed."""

    def close(self) -> None:
        """Leave nothing behind."""
        self.release()


@dataclass(frozen=True, slots=True)
class Opened:
    """What a source turned out to hold."""

    plan: WeightPlan
    digests: Mapping[str, int]


class Reader(ABC):
    """The engine's end: reads the source of one update at a time, in the engine's own thread."""

    @abstractmethod
    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Find the source and look at it; all that can be refused is refused here.

        Raises:
            InvalidRequest: it is not there, or is not what the request says.
        """

    @abstractmethod
    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield bucket ``index`` of the plan; a tensor is valid until the next one is asked for."""

    @abstractmethod
    def release(self) -> None:
        """The update is over, well or not: let go of what only it needed."""

    def close(self) -> None:
        """Let go of everything."""
        self.release()
