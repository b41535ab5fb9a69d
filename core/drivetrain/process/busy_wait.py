"""Busy waiting for a reply that is expected within milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

_LONGEST_S: Final = 0.1
"""Maximum seconds of busy waiting; in a longer wait the delay of waking up does not matter."""


@asynccontextmanager
async def busy_wait() -> AsyncGenerator[None, None]:
    """Keep this event loop from sleeping during the block, for a tenth of a second at most.

    A process that sleeps on an idle core wakes up some tenths of a millisecond late. Busy waiting occupies the core, so
    it is used only where the GPU does the work and the core is free.
    """
    staying = asyncio.create_task(_stay_awake(time.monotonic() + _LONGEST_S))
    try:
        yield
    finally:
        staying.cancel()


async def _stay_awake(until: float) -> None:
    while time.monotonic() < until:  # noqa: ASYNC110 - a busy loop on purpose
        await asyncio.sleep(0)


__all__ = ["busy_wait"]
