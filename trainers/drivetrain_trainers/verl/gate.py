"""Hold requests back while verl's trainer changes the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

_AGAIN_S: Final = 0.05
"""Interval at which requests are aborted again, for those that had not reached the engine."""


class Gate:
    """Admits requests, unless it was closed by :meth:`close`."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._rejecting = False
        self._inside = 0

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[bool]:
        """Wait until the gate is open, and count the request until the body ends. Yields False if it is turned away."""
        while not self._opened.is_set() and not self._rejecting:
            await self._opened.wait()
        if not self._opened.is_set():
            yield False
            return
        self._inside += 1
        self._idle.clear()
        try:
            yield True
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    async def close(self, abort: Callable[[], Awaitable[None]], *, rejecting: bool) -> int:
        """Close the gate and wait until no request is inside; return how many were.

        Args:
            abort: Aborts the requests that have reached the engine.
            rejecting: Turn later requests away; if false, they wait for :meth:`open`.
        """
        self._rejecting = rejecting
        self._opened.clear()
        inside = self._inside
        while self._inside:
            await abort()
            try:
                async with asyncio.timeout(_AGAIN_S):
                    await self._idle.wait()
            except TimeoutError:
                continue
        return inside

    def open(self) -> None:
        """Admit requests again."""
        self._rejecting = False
        self._opened.set()
