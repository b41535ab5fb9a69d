"""Deadlines for awaited work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from drivetrain.errors import DeadlineExceeded

_CATCH_UP_S: Final = 1.0
"""Seconds after the deadline in which a blocked event loop may still process results that have arrived."""


class Alarm:
    """Call ``ring`` after ``seconds``, unless cancelled.

    If the event loop is blocked at that time, ``ring`` is called later still: the loop first gets up to a second to
    process the results that arrived meanwhile.
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
        """Cancel the call."""
        self._handle.cancel()


@asynccontextmanager
async def deadline(seconds: float | None, waited_for: str) -> AsyncIterator[None]:
    """Limit the time of the work in the ``async with`` body.

    A result that is available when the deadline is checked wins, also if the event loop was blocked past the deadline.

    Raises:
        DeadlineExceeded: The time is over; the message names ``waited_for`` and the time.
    """
    scope = asyncio.timeout(None)
    alarm = None if seconds is None else Alarm(seconds, lambda: scope.reschedule(asyncio.get_running_loop().time()))
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"timed out after {seconds:g} s waiting for {waited_for}") from error
    finally:
        if alarm is not None:
            alarm.cancel()
