"""Limits of time within a case, so that no verdict depends on how busy the machine is.

Seconds on a busy machine count less: a half, if two processes want each core.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

LIMIT: Final = 60.0
"""Seconds that a wait of a case may take by default."""
_LOOK_SECONDS: Final = 5.0
"""Interval at which the machine's load is looked at."""
_MOST_SLOWDOWN: Final = 20.0


class Hangs(AssertionError):
    """A case, or a wait within it, took too long."""


def slowdown() -> float:
    """Return how many times slower than alone a process runs now: processes that want a core, per core."""
    return min(_MOST_SLOWDOWN, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Countdown:
    """The rest of a time limit. Ask for it every few seconds: the load may change."""

    def __init__(self, seconds: float = LIMIT) -> None:
        self._left = seconds
        self._seen = time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left; 0 if the time is over."""
        now = time.monotonic()
        self._left = max(0.0, self._left - (now - self._seen) / slowdown())
        self._seen = now
        return self._left

    def interval(self) -> float:
        """Return the seconds until the next check: the rest of the time, or a few; 0 if the time is over."""
        return min(self.left() * slowdown(), _LOOK_SECONDS)


@asynccontextmanager
async def within(what: str = "a wait of the case", seconds: float = LIMIT) -> AsyncGenerator[None, None]:
    """Raise :class:`Hangs`, naming ``what``, if the block takes longer than ``seconds``."""
    loop, scope, countdown = asyncio.get_running_loop(), asyncio.timeout(None), Countdown(seconds)
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if interval := countdown.interval():
            timer = loop.call_later(interval, look)
        else:
            scope.reschedule(loop.time())

    timer = loop.call_later(countdown.interval(), look)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise Hangs(f"hangs: {what} did not end within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()


async def until_ended(*tasks: asyncio.Future[Any], seconds: float = LIMIT) -> bool:
    """Wait up to ``seconds`` for tasks to end. Return True if they all did."""
    countdown = Countdown(seconds)
    while not all(task.done() for task in tasks) and (interval := countdown.interval()):
        await asyncio.wait(tasks, timeout=interval)
    return all(task.done() for task in tasks)


async def result_of(task: asyncio.Task[_T], seconds: float = LIMIT) -> _T:
    """Return a task's result, or raise :class:`Hangs` and leave it running if it takes longer than ``seconds``."""
    if not await until_ended(task, seconds=seconds):
        raise Hangs(f"hangs: what was awaited did not end within {seconds:g} s")
    return task.result()
