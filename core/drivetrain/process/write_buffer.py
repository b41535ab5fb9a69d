"""Buffered sending: the messages of one turn of the event loop share few writes."""

from __future__ import annotations

import asyncio
from typing import Final

from drivetrain.process.codec import forget_params
from drivetrain.process.wire import Message, frame

_ENOUGH: Final = 64 * 1024
"""Buffer size in bytes that triggers a write, so that the other side can begin to read."""


class WriteBuffer:
    """Collects frames; writes them at the end of the event loop's turn, or once the buffer is large."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0
        self._scheduled = False

    def put(self, message: Message) -> None:
        """Queue a message for sending.

        Raises:
            WireError: The message is larger than a frame may be; nothing is sent.
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
        """Write the queued messages now."""
        self._scheduled = False
        forget_params()
        self._write()

    def _write(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
