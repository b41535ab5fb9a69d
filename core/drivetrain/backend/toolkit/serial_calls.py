"""Calls of an engine that run one after another, each to its end, also if its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SerialCalls:
    """Runs calls one after another, each to its end: cancelling the caller does not interrupt a call that has begun.

    For calls that an engine cannot cancel. If only our side gave such a call up, its effects would be unknown, and an
    engine that does not number its answers would give its answer to the next call.
    """

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self._running: asyncio.Task[Any] | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``call``, made once earlier calls have ended."""
        await self._free.acquire()
        self._running = task = asyncio.ensure_future(call())  # the loop itself keeps no task alive
        task.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(task)
