"""An event loop for simulations, whose clock counts CPU time and skips every wait.

Where a program waits for timers only, as simulated engines do, such a clock shows how long a run would take on a
machine that does nothing else. Other processes do not slow it down, and a run takes no longer than its CPU time.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class CpuClock:
    """A clock that shows real time, except within :meth:`counting`."""

    def __init__(self) -> None:
        self.counts = False
        self._ahead = 0.0

    def time(self) -> float:
        return (time.thread_time() if self.counts else time.monotonic()) + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count this thread's CPU time and skip waits within. Nothing may wait for a thread or a process there."""
        self._switch(counts=True)
        try:
            yield
        finally:
            self._switch(counts=False)

    def _switch(self, *, counts: bool) -> None:
        now = self.time()
        self.counts = counts
        self._ahead += now - self.time()


class SkippingSelector(selectors.DefaultSelector):
    """Moves a clock forward in place of waiting."""

    def __init__(self, clock: CpuClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0 or not self._clock.counts:
            return super().select(timeout)
        events = super().select(0)
        if not events:
            self._clock.skip(timeout)
        return events


class CpuClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a :class:`CpuClock`'s."""

    def __init__(self) -> None:
        self.clock = CpuClock()
        super().__init__(SkippingSelector(self.clock))

    def time(self) -> float:
        return self.clock.time()


@dataclass(slots=True)
class CollectorPasses:
    """CPU seconds of each pass of the garbage collector within :meth:`watched`."""

    seconds: list[float] = field(default_factory=list)
    _begun: float = 0.0

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.seconds.append(time.thread_time() - self._begun)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time each pass within."""
        gc.callbacks.append(self._called)
        try:
            yield
        finally:
            gc.callbacks.remove(self._called)
