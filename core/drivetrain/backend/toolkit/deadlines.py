"""Waits that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from drivetrain.errors import DeadlineExceeded

_CATCH_UP_S: Final = 1.0
"""Most seconds that a blocked event loop gets to take in what came meanwhile."""


class Alarm:
    """Call back after some seconds, unless cancelled.

    If the event loop was blocked at that time, the call comes later: after as long as it was blocked, or one second.
    Results that came meanwhile are taken in first.
    """

    def __init__(self, seconds: float, ring: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._when = self._loop.time() + seconds
        self._handle = self._loop.call_at(self._when, self._due)

    def _due(self) -> None:
        late = max(0.0, self._loop.time() - self._when)
        self._handle = self._loop.call_later(min(late, _CATCH_UP_S), self._ring)

    def cancel(self) -> None:
        """Do not call back."""
        self._handle.cancel()


@asynccontextmanager
async def deadline(seconds: float | None, waited_for: str) -> AsyncIterator[None]:
    """Bound what is awaited within.

    A result that is there when the deadline is looked at wins, also if the event loop was blocked until then.

    Raises:
        DeadlineExceeded: naming what was waited for and for how long.
    """
    scope = asyncio.timeout(None)
    alarm = None if seconds is None else Alarm(seconds, lambda: scope.reschedule(asyncio.get_running_loop().time()))
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"waited {seconds:g} s for {waited_for}; it did not come") from error
    finally:
        if alarm is not None:
            alarm.cancel()
