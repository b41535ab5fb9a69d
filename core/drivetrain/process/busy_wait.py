"""Waiting without sleep, for an answer that is milliseconds away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

_LONGEST_S: Final = 0.1
"""Who waits longer than this does not notice how long it takes to wake."""


@asynccontextmanager
async def busy_wait() -> AsyncGenerator[None, None]:
    """Keep this event loop from sleeping within, for a tenth of a second at most.

    A process that sleeps on an idle core is some tenths of a millisecond late for what it waits for. Takes that core,
    which must be one that nobody else wants: of a host whose GPU does the work.
    """
    staying = asyncio.create_task(_stay_awake(time.monotonic() + _LONGEST_S))
    try:
        yield
    finally:
        staying.cancel()


async def _stay_awake(until: float) -> None:
    while time.monotonic() < until:  # noqa: ASYNC110 - it is not what is waited for
        await asyncio.sleep(0)


__all__ = ["busy_wait"]
