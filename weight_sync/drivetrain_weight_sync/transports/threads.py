"""Run blocking work in a thread that is never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], stop: Callable[[], None] = lambda: None) -> _T:
    """Run ``work`` in a thread. When cancelled, call ``stop`` and wait for the thread: its memory will be reused."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise
