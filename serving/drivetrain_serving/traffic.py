"""Counts of the tokens that the server has answered with."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

WINDOW_S: Final = 60
"""Seconds over which a rate is averaged."""


class Traffic:
    """Tokens sampled for the server's requests: all of them, and the rate over the last minute.

    The tokens of an answer that is not streamed count when it ends.

    Args:
        now: The time of the monotonic clock, here and below; the clock's own if not given.
    """

    def __init__(self, now: float | None = None) -> None:
        self.generated = 0
        """Number of tokens since the server was made."""
        self._started = time.monotonic() if now is None else now
        self._seconds: deque[list[int]] = deque()
        """Second and tokens of each second that had any; at most ``WINDOW_S`` of them."""

    def add(self, tokens: int, now: float | None = None) -> None:
        """Count sampled tokens."""
        self.generated += tokens
        second = int(time.monotonic() if now is None else now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += tokens
        else:
            self._seconds.append([second, tokens])
            self._forget(second)

    def per_second(self, now: float | None = None) -> float:
        """Return the tokens a second, over the last minute or since the server was made."""
        now = time.monotonic() if now is None else now
        self._forget(int(now))
        return sum(tokens for _, tokens in self._seconds) / min(max(now - self._started, 1.0), WINDOW_S)

    def uptime(self) -> float:
        """Return the seconds since the server was made."""
        return time.monotonic() - self._started

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()
