"""Answers: JSON, and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drivetrain.errors import DrivetrainError
from drivetrain_serving.http_layer.bodies import disconnected

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029")
"""Line ends of Unicode and their JSON escapes. A stream may hold them, but clients that read lines as text, such as
httpx's ``iter_lines``, end a line there. JSON escapes the other ones itself."""


def json_answer(body: object, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(_ENCODER.encode(body), status, media_type="application/json")


class EventStream(Response):
    """Server-sent events, one for each piece, and ``[DONE]`` at the end.

    ``pieces`` is closed at once when the client disconnects, even between two pieces. The connection ends clients that
    do not take their events.

    Args:
        pieces: The events to send.
        first: The first piece of ``pieces``, which the caller has read already.
        error_body: Makes the last event of an error that comes after the first piece.
    """

    end = DONE
    """Bytes after the last event."""

    @staticmethod
    def encoded(piece: object) -> bytes:
        """Return an event's bytes."""
        data = _ENCODER.encode(piece)
        for line_end, escape in _LINE_ENDS:
            data = data.replace(line_end, escape)
        return b"data: " + data + b"\n\n"

    def __init__(
        self,
        pieces: AsyncGenerator[object, None],
        first: object,
        error_body: Callable[[DrivetrainError], Mapping[str, object]],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._first = first
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._event(send, self._first)
            try:
                async for piece in pieces:
                    await self._event(send, piece)
            except DrivetrainError as error:
                await self._event(send, self._error_body(error))
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    async def _event(self, send: Send, piece: object) -> None:
        await send({"type": "http.response.body", "body": self.encoded(piece), "more_body": True})


class NamedEventStream(EventStream):
    """Server-sent events that name the ``type`` of each piece, as Anthropic's and OpenAI's newer streams do."""

    end = b""

    @staticmethod
    def encoded(piece: object) -> bytes:
        """Return an event's bytes."""
        name = piece.get("type") if isinstance(piece, Mapping) else None
        return f"event: {name}\n".encode() + EventStream.encoded(piece)


async def event_stream(
    pieces: AsyncGenerator[object, None],
    error_body: Callable[[DrivetrainError], Mapping[str, object]],
    kind: type[EventStream] = EventStream,
) -> EventStream:
    """Return a stream of ``pieces``. An error before the first piece raises here, so the answer can have its status."""
    try:
        first = await anext(pieces)
    except BaseException:
        with suppress(RuntimeError):
            await pieces.aclose()
        raise
    return kind(pieces, first, error_body)
