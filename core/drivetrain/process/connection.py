"""The trainer's end of the call socket: pending calls, open streams, and the messages for them."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, cast

from drivetrain.errors import DrivetrainError, EngineDied, EngineStateError, InvalidRequest, WireError
from drivetrain.process.rpc_methods import Method
from drivetrain.process.wire import (
    FRAME_LIMIT,
    Call,
    Cancel,
    End,
    Failure,
    FrameReader,
    FromHost,
    Hello,
    Item,
    Open,
    Progress,
    Reply,
    Welcome,
    from_host,
    read,
)
from drivetrain.process.wire_errors import exception
from drivetrain.process.write_buffer import WriteBuffer

_logger = logging.getLogger("drivetrain.host")
_LAST_WORDS_S: Final = 0.2


class Connection(asyncio.Protocol):
    """One connection to a host, bound to the event loop in which it is created.

    Args:
        report: Called with each progress message of the start.
        on_trouble: Called once, with the reason, if the socket closes unexpectedly or its bytes cannot be decoded.
        last_words: Returns the end of the host's log, to be appended to the error of an engine that died.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        on_trouble: Callable[[str], None],
        last_words: Callable[[], str],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._last_words = last_words
        self._on_trouble = on_trouble
        self._frames = FrameReader()
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[Method, asyncio.Future[object]]] = {}
        self._streams: dict[int, _Stream] = {}
        self._transport: asyncio.Transport | None = None
        self._refusal: Callable[[], DrivetrainError] | None = None
        self.hello: asyncio.Future[Hello] = self._loop.create_future()
        self.welcome: asyncio.Future[Welcome] = self._loop.create_future()

    # For HostedBackend -----------------------------------------------------------------------------------------------

    def open(self, message: Open) -> None:
        """Answer the host's ``Hello``."""
        self._writes.put(message)

    async def call(self, method: Method, arguments: Sequence[object]) -> object:
        """Call a method and return its result; cancelling the wait cancels the call in the host.

        Raises:
            DrivetrainError: The method's own error, or the reason why no reply will come.
        """
        call_id = self._send(method, arguments)
        reply: asyncio.Future[object] = self._loop.create_future()
        self._calls[call_id] = method, reply
        try:
            return await reply
        except asyncio.CancelledError:
            if self._calls.pop(call_id, None) is not None:
                self._writes.put(Cancel(call_id))
            raise

    async def stream(self, method: Method, arguments: Sequence[object]) -> AsyncGenerator[object, None]:
        """Call a streaming method; closing the iterator early closes the stream in the host."""
        call_id = self._send(method, arguments)
        stream = self._streams[call_id] = _Stream(method, self._loop)
        try:
            while True:
                while stream.items:
                    yield stream.items.popleft()
                if stream.error is not None:
                    raise stream.error
                if stream.ended:
                    return
                await stream.more()
        finally:
            if self._streams.pop(call_id, None) is not None:
                self._writes.put(Cancel(call_id))

    def fail(self, error: Callable[[], DrivetrainError]) -> None:
        """Fail every pending call with a new instance of the error, and refuse later calls with it."""
        self._refusal = error
        calls, self._calls = self._calls, {}
        streams, self._streams = self._streams, {}
        for _, reply in calls.values():
            if not reply.done():
                reply.set_exception(error())
        for stream in streams.values():
            stream.end(error())
        for handshake in (self.hello, self.welcome):
            if not handshake.done():
                handshake.set_exception(error())
                handshake.exception()  # retrieved so that asyncio does not log it: only one of the two is awaited

    def close(self) -> None:
        """Close the socket after the pending writes."""
        self._on_trouble = _nobody
        if self._transport is not None:
            self._writes.flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once."""
        self._on_trouble = _nobody
        if self._transport is not None:
            self._transport.abort()

    # The socket ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writes = WriteBuffer(self._loop, self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._take(read(from_host, payload))
        except WireError as error:
            message = str(error)
            self.fail(lambda: WireError(message))
            self._trouble(f"broke the wire protocol: {message}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._trouble("closed its call socket" if exc is None else f"lost its call socket: {exc}")

    def _trouble(self, reason: str) -> None:
        tell, self._on_trouble = self._on_trouble, _nobody
        tell(reason)

    def _send(self, method: Method, arguments: Sequence[object]) -> int:
        if self._refusal is not None:
            raise self._refusal()
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStateError(
                f"{method.name} was called in another event loop than the engine was started in; use one loop "
                "(one asyncio.run) for all of an engine's life"
            )
        try:
            packed = tuple(
                argument.codec.encode(value) for argument, value in zip(method.arguments, arguments, strict=True)
            )
        except WireError as error:  # inline engines refuse the same input with this error
            raise InvalidRequest(f"an argument of {method.name} cannot be sent to the engine: {error}") from error
        call_id = next(self._ids)
        self._writes.put(Call(call_id, method.name, packed))
        return call_id

    def _take(self, message: FromHost) -> None:
        if isinstance(message, Reply):
            self._reply(message)
        elif isinstance(message, Item):
            self._item(message)
        elif isinstance(message, End):
            if (stream := self._streams.pop(message.id, None)) is not None:
                stream.end(None)
            else:
                self._not_for_a_call("an End", message.id)
        elif isinstance(message, Failure):
            self._failure(message)
        elif isinstance(message, Progress):
            self._progress(message.text)
        elif isinstance(message, Hello):
            if not self.hello.done():
                self.hello.set_result(message)
        elif not self.welcome.done():
            self._frames.limit = FRAME_LIMIT
            self.welcome.set_result(message)

    def _progress(self, text: str) -> None:
        try:
            self._report(text)
        except Exception:  # the caller's code must not break the connection
            _logger.exception("the callback for the progress of the engine's start failed on %r", text)

    def _reply(self, message: Reply) -> None:
        method, reply = self._calls.pop(message.id, (None, None))
        if (stream := self._streams.pop(message.id, None)) is not None:
            self._writes.put(Cancel(message.id))
            stream.end(WireError(f"the host answered the stream {stream.method.name} with a Reply, not with Items"))
        if method is None or reply is None or reply.done():
            return  # cancelled while the reply was in transit
        try:
            reply.set_result(method.result.decode(message.result))
        except WireError as error:
            reply.set_exception(WireError(f"what the engine's {method.name} returned is not what it says: {error}"))

    def _not_for_a_call(self, what: str, call_id: int) -> None:
        """Fail a plain call that was answered like a stream, since no reply to it will come."""
        method, reply = self._calls.pop(call_id, (None, None))
        if method is not None and reply is not None and not reply.done():
            self._writes.put(Cancel(call_id))
            reply.set_exception(WireError(f"the host answered {method.name} with {what}, not with a Reply"))

    def _item(self, message: Item) -> None:
        stream = self._streams.get(message.id)
        if stream is None:
            self._not_for_a_call("an Item", message.id)
            return  # closed while the item was in transit
        try:
            stream.put(stream.method.result.decode(message.value))
        except WireError as error:
            del self._streams[message.id]
            self._writes.put(Cancel(message.id))
            stream.end(WireError(f"what the engine's {stream.method.name} yielded is not what it says: {error}"))

    def _failure(self, message: Failure) -> None:
        if message.error == EngineDied.__name__:
            # Its last output comes through a pipe and may not have arrived yet.
            self._loop.call_later(_LAST_WORDS_S, self._failed, message)
        else:
            self._failed(message)

    def _failed(self, message: Failure) -> None:
        error = exception(message)
        if type(error) is EngineDied:
            error = EngineDied(f"{error}{self._last_words()}")
        if message.id == 0:
            self.fail(lambda: exception(message))
        elif (stream := self._streams.pop(message.id, None)) is not None:
            stream.end(error)
        elif (waiting := self._calls.pop(message.id, None)) is not None and not waiting[1].done():
            waiting[1].set_exception(error)


class _Stream:
    """Received items of a stream that are not read yet."""

    def __init__(self, method: Method, loop: asyncio.AbstractEventLoop) -> None:
        self.method = method
        self.items: collections.deque[object] = collections.deque()
        self.ended = False
        self.error: DrivetrainError | None = None
        self._loop = loop
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: object) -> None:
        self.items.append(item)
        self._wake()

    def end(self, error: DrivetrainError | None) -> None:
        self.ended, self.error = True, error
        self._wake()

    async def more(self) -> None:
        self._reader = self._loop.create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _nobody(reason: str) -> None:
    """Ignore the end of a socket that was closed on purpose."""


__all__ = ["Connection"]
