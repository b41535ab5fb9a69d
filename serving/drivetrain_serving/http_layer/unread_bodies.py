"""Answers that are sent before the end of a request: uvicorn's protocol, which reads on so that the client gets them.

Many clients send a whole body before they read. If the server closes a connection with bytes unread, the kernel resets
it, and the client finds the reset in place of the answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

_ANSWERABLE: Final = (h11.IDLE, h11.SEND_RESPONSE)
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")


class DiscardsUnreadBodies(H11Protocol):
    """HTTP/1.1 on one connection; discards the rest of a request that has been answered.

    If the answer keeps the connection, the next request is answered after the end of the body. Otherwise our half of
    the connection is closed after the answer, and the other half at the end of the body or when the client closes it.
    A body that exceeds the bounds below ends the connection.
    """

    most_bytes: ClassVar[int]
    """Bytes that are discarded at most."""
    most_seconds: ClassVar[float]
    """Seconds that the rest of a request may take after the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        self._socket = transport
        self._left = self.most_bytes
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        super().connection_made(_Transport(transport, self.close_connection))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._read_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        if self._deadline is None:
            super().data_received(data)
            return
        self._left -= len(data)
        if self._left < 0:
            self._socket.abort()
        elif not self.transport.is_closing():
            super().data_received(data)  # h11 discards the body and takes the next request
            if self.conn.our_state is not h11.DONE and not self.transport.is_closing():
                self._read_no_more()
                if self.conn.our_state is h11.IDLE:
                    self.timeout_keep_alive_task = self.loop.call_later(
                        self.timeout_keep_alive, self.timeout_keep_alive_handler
                    )
        elif self.conn.their_state is h11.SEND_BODY:
            self._discard(data)

    def _discard(self, data: bytes) -> None:
        """Discard bytes; close the connection at the end of the body."""
        self.conn.receive_data(data)
        try:
            while isinstance(self.conn.next_event(), h11.Data):
                continue
        except h11.RemoteProtocolError:
            return  # the end cannot be found: discard until the client closes the connection
        if self.conn.their_state is not h11.SEND_BODY:
            self._socket.close()

    def on_response_complete(self) -> None:
        """Keep the connection after an answer."""
        super().on_response_complete()
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._read_on()

    def shutdown(self) -> None:
        """Close the connection, after the answer if one is due; it says so."""
        if self.cycle is not None and not self.cycle.response_started:
            # as if the client had asked for it
            self.cycle.scope["headers"] = [*self.cycle.scope["headers"], CLOSE_HEADER]
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP, in the place where uvicorn handles the error."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.refuse(status, msg if error is None else f"{msg} {error}")

    def refuse(self, status: int, words: str) -> None:
        """Answer bytes that are no whole request, unless an answer has begun, and close the connection."""
        self._refused = True
        if self.conn.our_state in _ANSWERABLE:
            is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
            body = words.encode()
            headers = [_TEXT, CLOSE_HEADER, (b"content-length", b"%d" % len(body))]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=b"" if is_head else body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def close_connection(self) -> None:
        """Close the connection, or our half of it if the client may be sending."""
        if not self._refused and self.conn.their_state is not h11.SEND_BODY:
            self._socket.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # as uvicorn does at the end of a connection
            self.cycle.message_event.set()
        with suppress(OSError):  # the client has reset the connection, and connection_lost follows
            self._socket.write_eof()
        self._read_on()

    def _read_on(self) -> None:
        self.flow.resume_reading()
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.most_seconds, self._socket.abort)

    def _read_no_more(self) -> None:
        self._left = self.most_bytes
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Transport(asyncio.Transport):
    """A connection as uvicorn sees it, which may go on when uvicorn has closed it.

    Args:
        connection: The connection.
        close: Closes it, now or later.
    """

    def __init__(self, connection: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self._connection = connection
        self._close = close
        self._closed = False

    def close(self) -> None:
        if not self.is_closing():
            self._closed = True
            self._close()

    def is_closing(self) -> bool:
        return self._closed or self._connection.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.write(data)

    def pause_reading(self) -> None:
        self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._connection.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._connection.get_extra_info(name, default)


class ClosesUnlessContinued:
    """Middleware: an answer to a client that was not told to send its body closes the connection.

    Such a client may leave the body out. The server could then not tell where the next request begins.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or Headers(scope=scope).get("expect", "").lower() != "100-continue":
            await self._app(scope, receive, send)
            return
        continued = False

        async def continuing() -> Message:
            nonlocal continued
            continued = True
            return await receive()

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not continued:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, continuing, closing)
