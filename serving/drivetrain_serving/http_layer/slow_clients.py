"""Time limits of a connection: uvicorn's protocol, which ends one whose client keeps the server waiting.

uvicorn itself waits for ever for the headers of a request, for a client to take an answer, and for the first byte.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import ClassVar, Final

import h11

from drivetrain_serving.http_layer.unread_bodies import DiscardsUnreadBodies

_LEAST: Final = 1 << 16
"""Bytes of an answer that a client must take in each period."""
_NUMBER: Final = struct.Struct("i")
_RESET: Final = struct.pack("ii", 1, 0)
"""Value of ``SO_LINGER`` that resets a connection when it is closed, and discards unsent bytes."""


class EndsSlowClients(DiscardsUnreadBodies):
    """HTTP/1.1 on one connection; ends it if the client does not send its headers, or does not take its answers.

    Bodies have limits of their own, in the application: they are part of a request that can be answered.
    """

    header_seconds: ClassVar[float]
    """Seconds that the headers of a request may take after their first byte."""
    send_seconds: ClassVar[float | None]
    """Seconds in which a client must take a part of its answer; None: no limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the idle timeout, which kept connections have, before the first request too."""
        self._headers_due: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._be_idle_no_more()
        self._await_no_headers()
        self._await_no_taking()
        super().connection_lost(exc)

    # Headers ---------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        super().data_received(data)
        self._look_at_headers()

    def on_response_complete(self) -> None:
        """Keep the connection after an answer."""
        super().on_response_complete()
        self._look_at_headers()

    def _look_at_headers(self) -> None:
        """Start the timer when headers begin, and stop it when they are complete."""
        begun = self.conn.their_state is h11.IDLE and not self.transport.is_closing() and self.conn.trailing_data[0]
        if not begun:
            self._await_no_headers()
        elif self._headers_due is None:
            self._be_idle_no_more()
            self._headers_due = self.loop.call_later(self.header_seconds, self._headers_are_late)

    def _be_idle_no_more(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _headers_are_late(self) -> None:
        self.refuse(408, f"The headers did not come within {self.header_seconds:g} s.")

    def _await_no_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    # Answers ---------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the timer of the client: the write buffer is full."""
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        """Stop the timer: the client has taken most of the buffer."""
        super().resume_writing()
        self._await_no_taking()
        if self.transport.is_closing():
            self._await_taking()

    def close_connection(self) -> None:
        """Close the connection once the client has taken its answer, or is late."""
        super().close_connection()
        self._await_taking()

    def _await_taking(self) -> None:
        seconds = self.send_seconds
        if seconds is not None and self._sending is None and self._socket.get_write_buffer_size():
            self._sending = self.loop.call_later(seconds, self._look_at_taking, self._unsent())

    def _look_at_taking(self, before: int) -> None:
        self._sending = None
        if before - self._unsent() >= _LEAST:
            self._await_taking()
        elif self._socket.get_write_buffer_size():
            self.logger.warning("a client did not take its answer within %g s", self.send_seconds)
            # Without a reset, the kernel would keep sending its buffer after the connection is closed.
            self._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._socket.abort()

    def _await_no_taking(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _unsent(self) -> int:
        """Return the bytes that the client has not received, those in the kernel's buffer included.

        The kernel takes more of them only when a third of its buffer is free, which is a megabyte and more.
        """
        held = fcntl.ioctl(self._socket.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_NUMBER.size))
        in_kernel: int = _NUMBER.unpack(held)[0]
        return self._socket.get_write_buffer_size() + in_kernel
