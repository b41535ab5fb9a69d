"""One sample on its way to the backend, and the samples of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from drivetrain.backend.base import GenerateRequest

Given = tuple[str, object]
"""A prompt's name in errors, and the prompt as the caller gave it."""
READ: Final = ("", None)


@dataclass(slots=True, eq=False)
class Samples:
    """The samples of one prompt.

    Each sample is created when its turn comes, so a large ``n`` takes no memory in advance.
    """

    request: GenerateRequest
    """The request that the samples share; its ``request_id`` is the one that the user gave."""
    prompt_index: int
    seeds: Callable[[int], int | None]
    """Returns the seed of a sample, by its index."""
    given: Given = READ
    """The prompt as the caller gave it; ``READ`` once ``request`` holds its token ids."""
    aborted: bool = False
    """True once all samples were asked to end."""
    aborted_samples: set[int] = field(default_factory=set)
    """Indices of samples that were asked to end one by one."""
    holders_request: str | None = None
    """Id of the request of which a holder sent this one sample, if that has several."""
    vocab_size: int = 2**31
    """The model's vocabulary size: the engine's token ids are below it."""

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.request.params.n

    def sample(self, index: int) -> Sample:
        """Make one sample."""
        request_id = self.request.request_id if self.count == 1 else f"{self.request.request_id}/{index}"
        scoring = None if index else self.request.scoring  # one sample scores the prompt for all
        request = replace(self.request, request_id=request_id, seed=self.seeds(index), scoring=scoring)
        return Sample(request, self, index)

    def index_of(self, request_id: str) -> int | None:
        """Return the index of the sample with this request id; None if there is no such sample or only one sample."""
        base, _, number = request_id.rpartition("/")
        if self.count == 1 or base != self.request.request_id or not number.isdecimal():
            return None
        index = int(number) if len(number) < 10 else self.count
        return index if index < self.count and number == str(index) else None


@dataclass(slots=True, eq=False)
class Sample:
    """One sample: its request, and its place in the call."""

    request: GenerateRequest
    samples: Samples
    sample_index: int
    task: asyncio.Task[object] | None = None
    """The task that awaits the backend."""

    @property
    def prompt_index(self) -> int:
        """Index of its prompt in the call."""
        return self.samples.prompt_index

    @property
    def aborted(self) -> bool:
        """True once the sample was asked to end."""
        return self.samples.aborted or self.sample_index in self.samples.aborted_samples
