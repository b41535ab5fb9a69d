"""The newest lines of a host's output, and the part of them that an error message shows."""

from __future__ import annotations

import collections
import functools
import math
import time
from collections.abc import Sequence
from typing import Final

from drivetrain.process.logged_exceptions import first_exception

_LINES_KEPT: Final = 1000
_LINES_SHOWN: Final = 40
_LONGEST_SHOWN: Final = 300
"""Characters of a line that are shown: engines print all their settings in one line of 13,000."""


class HostLog:
    """The newest lines that a host and its children printed, 1000 at most. Lines may be read in any thread."""

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[float, str]] = collections.deque(maxlen=_LINES_KEPT)

    def add(self, line: str) -> None:
        """Add the next line."""
        self._lines.append((time.monotonic(), line))

    def lines(self, seconds: float = math.inf) -> list[str]:
        """Return the lines of the last ``seconds`` seconds."""
        since = time.monotonic() - seconds
        return [line for when, line in tuple(self._lines) if when >= since]


def with_end_of_log(what: str, lines: Sequence[str], recent: Sequence[str] | None = None) -> str:
    """Return the message ``what`` with the exception that made the engine fail and the last lines of its log.

    Args:
        what: The message so far. Its first line gets the exception, unless the message holds it already.
        lines: The log.
        recent: Lines among which the exception is searched; None: all of them.
    """
    if not lines:
        return what
    found = _first_exception(tuple(lines if recent is None else recent))
    if found and found.partition(": ")[2] not in what:
        first_line, *others = what.split("\n")
        what = "\n".join([f"{first_line}; first exception in its log: {found}", *others])
    return "\n".join([what, "last lines of its log:", *map(_shown, lines[-_LINES_SHOWN:])])


def _shown(line: str) -> str:
    return line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]} … [{len(line)} characters]"


# Each request in flight gets the message when its engine dies.
_first_exception: Final = functools.lru_cache(maxsize=1)(first_exception)
