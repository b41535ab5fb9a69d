"""A line between a sender's process and the engine's owner: calls in one direction, answers in the other."""

from __future__ import annotations

import asyncio
import pickle
import socket
from contextlib import suppress
from typing import Self


class LineLost(ConnectionError):
    """The process at the other end is gone, or has closed the line."""


class Line:
    """Sends pickled values with a length prefix; both ends are our own, so pickle is safe."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._heard: asyncio.Queue[object] = asyncio.Queue()
        self._lost = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Wrap one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=end))

    async def _listen(self) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(4), "big")
                self._heard.put_nowait(pickle.loads(await self._reader.readexactly(length)))
        self._lost = True
        self._heard.put_nowait(None)

    async def hear(self) -> object:
        """Return the next value; can be cancelled and called again."""
        if self._lost and self._heard.empty():
            raise LineLost("the other process is gone")
        value = await self._heard.get()
        if value is None:
            raise LineLost("the other process is gone")
        return value

    async def say(self, value: object) -> None:
        """Send a value; ignore a lost peer."""
        data = pickle.dumps(value)
        with suppress(OSError):
            self._writer.write(len(data).to_bytes(4, "big") + data)
            await self._writer.drain()

    async def close(self) -> None:
        """Close the line."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
