"""Measure how much an engine computes in the trainer's process while nothing is asked of it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

IDLE: Final = 0.05
"""Share of a core that an engine without requests may take of the trainer's process."""
_WINDOWS: Final = 4
_WINDOW: Final = 0.25
"""Seconds of one look at an idle process."""


async def check_rests() -> None:
    """Raise if this process computes though nothing is asked of it, as a thread does that polls without a pause.

    The least busy of several windows counts. On a busy machine a polling thread gets less of a core, and looks better.
    """
    shares: list[float] = []
    for _ in range(_WINDOWS):
        began, computed = time.monotonic(), time.process_time()
        await asyncio.sleep(_WINDOW)
        shares.append((time.process_time() - computed) / (time.monotonic() - began))
    least = min(shares)
    assert least <= IDLE, (
        f"an idle engine takes {least:.0%} of a core of the trainer's process; at most {IDLE:.0%} is fine"
    )
