"""Measure how long an event loop was blocked by its own thread, independent of the machine's load."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LONGEST: Final = 0.5
"""Seconds for which a call may block the trainer's event loop, at once or in all."""
_SHORTEST: Final = 0.02
"""Shorter stalls, in seconds, do not add up: threads that compute hold each other up for some milliseconds."""
_TICK: Final = 0.005
_LATE: Final = 0.1
"""A heartbeat that is later than this, in seconds, shows that the whole process stood still."""


@asynccontextmanager
async def check_it_runs() -> AsyncGenerator[None, None]:
    """Raise at the end of the block if callbacks blocked the running loop for more than :data:`LONGEST` seconds in all.

    The time counts for which the loop's thread computed, or waited for something else than a core. Time during which it
    was runnable but not scheduled by the kernel does not count, nor does time during which no thread ran at all.
    """
    stalls: list[float] = []
    with _without_collections(), _Heartbeat() as heartbeat:
        watch = asyncio.create_task(_watch(stalls, heartbeat))
        try:
            await asyncio.sleep(0)  # a block may stand still before it ever yields to the watch
            yield
            await asyncio.sleep(2 * _TICK)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
    longer = [stall for stall in stalls if stall > _SHORTEST]
    assert sum(longer) <= LONGEST, (
        f"the event loop stood still for {sum(longer):.2f} s, up to {max(longer):.2f} s at once; at most {LONGEST:g} s "
        "in all are fine"
    )


@contextmanager
def _without_collections() -> Generator[None, None, None]:
    """Let no automatic garbage collection, which takes a good part of a second, run in the loop's thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Heartbeat:
    """A thread that runs every few milliseconds, and whose delays tell for how long the process stood still."""

    def __init__(self) -> None:
        self._missed = 0.0
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def missed(self) -> float:
        """Return the seconds, until now, for which the process stood still."""
        with self._lock:
            return self._missed + self._late()

    def _late(self) -> float:
        late = time.monotonic() - self._last - _TICK
        return late if late > _LATE else 0.0

    def _beat(self) -> None:
        while not self._ended.wait(_TICK):
            with self._lock:
                self._missed += self._late()
                self._last = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Clocks:
    """Readings in seconds, taken in the loop's thread."""

    time: float
    computed: float
    """CPU time of the thread."""
    waited: float
    """Time for which the thread was runnable but not running: the second of the three figures in ``schedstat``."""
    missed: float

    @classmethod
    def read(cls, heartbeat: _Heartbeat) -> _Clocks:
        schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        waited = int(schedstat.read_bytes().split()[1]) / 1e9
        return cls(time.monotonic(), time.thread_time(), waited, heartbeat.missed())

    def blocked_until(self, later: _Clocks) -> float:
        """Return the time for which the thread held its loop: it computed, or waited for something else than a core."""
        computed = later.computed - self.computed
        passed = (later.time - self.time) - (later.waited - self.waited) - (later.missed - self.missed) - _TICK
        return max(computed, passed)


async def _watch(stalls: list[float], heartbeat: _Heartbeat) -> None:
    before = _Clocks.read(heartbeat)
    while True:
        await asyncio.sleep(_TICK)
        now = _Clocks.read(heartbeat)
        stalls.append(before.blocked_until(now))
        before = now
