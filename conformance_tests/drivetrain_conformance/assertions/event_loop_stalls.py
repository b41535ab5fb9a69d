"""Measure how long an event loop was blocked by its own thread, independent of the machine's load."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

LONGEST: Final = 0.5
"""Seconds for which a call may block the trainer's event loop."""
_TICK: Final = 0.005


@asynccontextmanager
async def check_it_runs() -> AsyncGenerator[None, None]:
    """Raise at the end of the block if one callback blocked the running loop for more than :data:`LONGEST` seconds.

    Time during which the loop's thread was runnable but not scheduled by the kernel is not counted.
    """
    stalls: list[float] = []
    watch = asyncio.create_task(_watch(stalls))
    try:
        await asyncio.sleep(0)  # a block may stand still before it ever yields to the watch
        yield
        await asyncio.sleep(2 * _TICK)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    worst = max(stalls, default=0.0)
    assert worst <= LONGEST, f"the event loop stood still for {worst:.2f} s; at most {LONGEST:g} s are fine"


async def _watch(stalls: list[float]) -> None:
    scheduled = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    before, waited = time.monotonic(), _waited(scheduled)
    while True:
        await asyncio.sleep(_TICK)
        now, more = time.monotonic(), _waited(scheduled)
        stalls.append((now - before) - (more - waited) - _TICK)
        before, waited = now, more


def _waited(schedstat: Path) -> float:
    """Seconds that the thread spent runnable but not running: the second of the three figures in ``schedstat``."""
    return int(schedstat.read_bytes().split()[1]) / 1e9
