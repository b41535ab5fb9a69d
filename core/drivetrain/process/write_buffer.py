"""Messages on their way out: those of one turn of the event loop go in few writes."""

from __future__ import annotations

import asyncio
from typing import Final

from drivetrain.process.codec import forget_params
from drivetrain.process.wire import Message, frame

_ENOUGH: Final = 64 * 1024
"""Bytes worth a write of their own, so that the other side can begin while this one goes on."""


class WriteBuffer:
    """Collects frames and writes them to a transport at the end of the loop's turn, or once they are many."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0
        self._scheduled = False

    def put(self, message: Message) -> None:
        """Send a message soon.

        Raises:
            WireError: it is larger than a frame may be; nothing is sent.
        """
        parts = frame(message)
        self._parts += parts
        self._size += len(parts[1])
        if self._size > _ENOUGH:
            self._write()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write now what was put."""
        self._scheduled = False
        forget_params()
        self._write()

    def _write(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


__all__ = ["WriteBuffer"]
