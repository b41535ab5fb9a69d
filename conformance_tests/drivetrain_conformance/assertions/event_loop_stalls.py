"""How long an event loop stood still because of its own thread, however busy the machine is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

_TICK: Final = 0.005


@asynccontextmanager
async def check_it_runs(longest: float) -> AsyncGenerator[None, None]:
    """Raise at the end of the block if one callback held the running loop for more than ``longest`` seconds.

    Time in which the kernel let other threads run instead of a runnable loop does not count.
    """
    stalls: list[float] = []
    watch = asyncio.create_task(_watch(stalls))
    try:
        yield
        await asyncio.sleep(2 * _TICK)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    worst = max(stalls, default=0.0)
    assert worst <= longest, f"the event loop stood still for {worst:.2f} s; at most {longest:g} s are fine"


async def _watch(stalls: list[float]) -> None:
    scheduled = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    before, waited = time.monotonic(), _waited(scheduled)
    while True:
        await asyncio.sleep(_TICK)
        now, more = time.monotonic(), _waited(scheduled)
        stalls.append((now - before) - (more - waited) - _TICK)
        before, waited = now, more


def _waited(schedstat: Path) -> float:
    """Seconds that the thread has been runnable without running: the second figure of the kernel's three."""
    return int(schedstat.read_bytes().split()[1]) / 1e9
