"""One sample on its way to the backend, and the samples of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from drivetrain.backend.base import GenerateRequest

Given = tuple[str, object]
"""A prompt as a caller gave it, beside how errors call it."""
READ: Final = ("", None)


@dataclass(slots=True, eq=False)
class Samples:
    """The samples of one prompt, which is read first.

    Each is made at its turn, so that a large ``n`` takes no memory ahead of it.
    """

    request: GenerateRequest
    """What they have in common; its ``request_id`` is the one that the user gave."""
    prompt_index: int
    seeds: Callable[[int], int | None]
    """The seed of each sample, by its index."""
    given: Given = READ
    """The prompt as it was given, until it is read."""
    aborted: bool = False
    """Whether someone asked to end all of them."""
    aborted_samples: set[int] = field(default_factory=set)
    """Those that someone asked to end by themselves."""
    vocab_size: int = 2**31
    """Of the model; an engine's ids are below it."""

    @property
    def count(self) -> int:
        """How many there are."""
        return self.request.params.n

    def sample(self, index: int) -> Sample:
        """Make one sample."""
        request_id = self.request.request_id if self.count == 1 else f"{self.request.request_id}/{index}"
        return Sample(replace(self.request, request_id=request_id, seed=self.seeds(index)), self, index)

    def index_of(self, request_id: str) -> int | None:
        """Which of several samples has this request id; None: it is of no sample here, or there is only one."""
        base, _, number = request_id.rpartition("/")
        if self.count == 1 or base != self.request.request_id or not number.isdecimal():
            return None
        index = int(number) if len(number) < 10 else self.count
        return index if index < self.count and number == str(index) else None


@dataclass(slots=True, eq=False)
class Sample:
    """One sample on its way: its request, and where it belongs."""

    request: GenerateRequest
    samples: Samples
    sample_index: int
    task: asyncio.Task[object] | None = None
    """The one that waits for the backend."""

    @property
    def prompt_index(self) -> int:
        """Which prompt of the call it is of."""
        return self.samples.prompt_index

    @property
    def aborted(self) -> bool:
        """Whether someone asked to end it."""
        return self.samples.aborted or self.sample_index in self.samples.aborted_samples
