"""A request passed on to another process's Unix socket, and its answer back; both are streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import h11
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

_LOGGER: Final = logging.getLogger("drivetrain.serving")
_OF_ONE_CONNECTION: Final = frozenset(
    {b"connection", b"date", b"expect", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
"""Headers that each server and client writes for itself."""
_CHUNKED: Final = (b"transfer-encoding", b"chunked")
_CLOSE: Final = (b"connection", b"close")
_PIECE: Final = 1 << 16

_LOST: Final = (OSError, EOFError, h11.ProtocolError)


class _Upstream:
    """One connection to another process, for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def receive(self) -> h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage:
        """Return the next event of the answer.

        Raises:
            EOFError: The other process closed the connection before the answer's end.
        """
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_PIECE))
            elif isinstance(event, h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage):
                return event
            else:
                raise EOFError("the connection was closed before the end of the answer")

    def close(self) -> None:
        self._writer.close()


async def pass_on(
    path: Path, scope: Scope, receive: Receive, send: Send, *, unreachable: Callable[[], Response]
) -> None:
    """Pass a request on, and its answer back. The connection is closed as soon as the client leaves.

    Args:
        path: The other process's Unix socket.
        scope: The request.
        receive: Receives its body.
        send: Sends the answer.
        unreachable: Makes the answer if the other process gives none.
    """
    try:
        upstream = _Upstream(*await asyncio.open_unix_connection(path))
    except OSError:
        await unreachable()(scope, receive, send)
        return
    asking = asyncio.ensure_future(_ask(upstream, scope, receive))
    answering = asyncio.ensure_future(_answer(upstream, send))
    try:
        await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
    finally:
        upstream.close()
        for task in (asking, answering):
            task.cancel()
        await asyncio.gather(asking, answering, return_exceptions=True)
    if not answering.cancelled() and not answering.result():
        await unreachable()(scope, receive, send)


async def _ask(upstream: _Upstream, scope: Scope, receive: Receive) -> None:
    """Send the request; return when the client has left."""
    try:
        await upstream.send(_head(scope))
        while (message := await receive())["type"] != "http.disconnect":
            if body := message.get("body"):
                await upstream.send(h11.Data(data=body))
            if not message.get("more_body"):
                await upstream.send(h11.EndOfMessage())
                break
    except _LOST:  # the other process answers before the end of the body, or is gone: _answer tells
        pass
    while (await receive())["type"] != "http.disconnect":
        continue


def _head(scope: Scope) -> h11.Request:
    headers = [(name, value) for name, value in scope["headers"] if name not in _OF_ONE_CONNECTION]
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names:
        headers.append(_CHUNKED)
    if b"host" not in names:  # of HTTP/1.0
        headers.append((b"host", b"localhost"))
    query = scope["query_string"]
    return h11.Request(
        method=scope["method"], target=scope["raw_path"] + (b"?" + query if query else b""), headers=headers
    )


async def _answer(upstream: _Upstream, send: Send) -> bool:
    """Send the answer; return False if there is none. One that breaks off is broken off for the client, too."""
    try:
        while isinstance(response := await upstream.receive(), h11.InformationalResponse):
            continue
    except _LOST:
        return False
    assert isinstance(response, h11.Response)
    headers = [(name, value) for name, value in response.headers if name not in _OF_ONE_CONNECTION]
    if _CLOSE in [(name, value.lower()) for name, value in response.headers]:
        headers.append(_CLOSE)
    start: Message = {"type": "http.response.start", "status": response.status_code, "headers": headers}
    await send(start)
    try:
        while isinstance(event := await upstream.receive(), h11.Data):
            await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except _LOST as error:
        _LOGGER.warning("an answer that was passed on broke off: %s", str(error) or type(error).__name__)
    return True
