"""The calling end of a socket: calls that wait, streams that fill, and the messages that wake them.

Both hops use it: from a trainer to its host process, and from a host to a worker inside the engine.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import cast

from drivetrain.backend.toolkit.uninterrupted import to_its_end
from drivetrain.errors import DrivetrainError, EngineStateError, InvalidRequest, WireError
from drivetrain.process.rpc_methods import Method
from drivetrain.process.wire import (
    FRAME_LIMIT,
    Call,
    Cancel,
    End,
    Failure,
    FrameReader,
    FromHost,
    Item,
    Message,
    Reply,
    from_host,
    read,
)
from drivetrain.process.wire_errors import exception
from drivetrain.process.write_buffer import WriteBuffer

_logger = logging.getLogger("drivetrain.engine")


class RpcClient(asyncio.Protocol):
    """Calls methods at the other end of a socket. Belongs to the event loop in which it was created.

    Args:
        on_lost: Called once if the socket closes unasked, or its bytes cannot be read; gets the reason.
        frame_limit: Largest payload in bytes that is accepted.
    """

    def __init__(self, on_lost: Callable[[str], None], frame_limit: int = FRAME_LIMIT) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._frames = FrameReader(frame_limit)
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[Method, asyncio.Future[object]]] = {}
        self._streams: dict[int, _Stream] = {}
        self._given_up: dict[int, asyncio.Future[bool]] = {}
        """Cancelled calls that are not over. The result: true if the call had returned before it was cancelled."""
        self._undoing: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None
        self._refusal: Callable[[], DrivetrainError] | None = None

    async def call(self, method: Method, arguments: Sequence[object]) -> object:
        """Call a method and return its result; cancelling the wait cancels the call at the other end.

        Raises:
            DrivetrainError: the method's error, or the reason for which no reply will come.
        """
        call_id, reply = self._begin_call(method, arguments)
        try:
            return await reply
        except asyncio.CancelledError:
            if self._calls.pop(call_id, None) is not None:
                self._send(Cancel(call_id))
            raise

    async def call_to_its_end(
        self,
        method: Method,
        arguments: Sequence[object],
        seconds: float,
        undo: Callable[[], Awaitable[object]] | None = None,
    ) -> object:
        """Call a method as :meth:`call` does; if the caller is cancelled, the call has ended when this raises.

        Args:
            method: The method.
            arguments: Its arguments.
            seconds: Longest wait for the end of a cancelled call, also if the caller is cancelled again meanwhile.
            undo: Called if the method had returned before the cancellation reached it, even if that is known only after
                ``seconds``. It must bound its own time.

        Raises:
            DrivetrainError: as for :meth:`call`.
        """
        call_id, reply = self._begin_call(method, arguments)
        try:
            return await reply
        except asyncio.CancelledError:
            returned: asyncio.Future[bool] = self._loop.create_future()
            if self._calls.pop(call_id, None) is None:
                returned.set_result(not reply.cancelled() and reply.exception() is None)
            else:
                self._given_up[call_id] = returned
                self._send(Cancel(call_id))
            undone = self._loop.create_task(self._undone(method, returned, undo))
            self._undoing.add(undone)
            undone.add_done_callback(self._undoing.discard)
            await to_its_end(_ended(returned, undone, seconds))
            raise

    def _begin_call(self, method: Method, arguments: Sequence[object]) -> tuple[int, asyncio.Future[object]]:
        """Send a call; return its id, and the future of its reply."""
        call_id = self._send_call(method, arguments)
        reply: asyncio.Future[object] = self._loop.create_future()
        self._calls[call_id] = method, reply
        return call_id, reply

    async def _undone(
        self, method: Method, returned: asyncio.Future[bool], undo: Callable[[], Awaitable[object]] | None
    ) -> None:
        """Undo a cancelled call once it is over, if it had returned nevertheless."""
        if await returned and undo is not None:
            try:
                await undo()
            except DrivetrainError as error:
                _logger.warning("%s was cancelled after it had returned, and was not undone: %s", method.name, error)

    def _over(self, call_id: int, *, returned: bool) -> bool:
        """Drop the record of a cancelled call at its end; return False if there is none of this id."""
        end = self._given_up.pop(call_id, None)
        if end is None:
            return False
        if not end.done():
            end.set_result(returned)
        return True

    async def stream(self, method: Method, arguments: Sequence[object]) -> AsyncGenerator[object, None]:
        """Call a method that yields; closing the iterator early closes it at the other end."""
        call_id = self._send_call(method, arguments)
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
                self._send(Cancel(call_id))

    def fail(self, error: Callable[[], DrivetrainError]) -> None:
        """End every waiting call with a new instance of this error, and refuse later calls with it."""
        self._refusal = error
        calls, self._calls = self._calls, {}
        streams, self._streams = self._streams, {}
        for _, reply in calls.values():
            if not reply.done():
                reply.set_exception(error())
        for stream in streams.values():
            stream.end(error())
        for call_id in tuple(self._given_up):
            self._over(call_id, returned=False)

    @property
    def refusal(self) -> DrivetrainError | None:
        """The error with which calls are refused; None while the connection works."""
        return None if self._refusal is None else self._refusal()

    def close(self) -> None:
        """Close the socket after everything that was sent has been written."""
        self._on_lost = _ignore
        if self._transport is not None:
            self._writes.flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the socket now."""
        self._on_lost = _ignore
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
            self._lost(f"broke the wire protocol: {message}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost("closed its call socket" if exc is None else f"lost its call socket: {exc}")

    def _lost(self, reason: str) -> None:
        tell, self._on_lost = self._on_lost, _ignore
        tell(reason)

    def _send(self, message: Message) -> None:
        self._writes.put(message)

    def _send_call(self, method: Method, arguments: Sequence[object]) -> int:
        if self._refusal is not None:
            raise self._refusal()
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStateError(
                f"{method.name} was called in another event loop than the engine was started in; use one loop "
                "(one asyncio.run) for all of an engine's life"
            )
        try:
            packed = method.pack(arguments)
        except WireError as error:  # an engine in this process refuses the same input with the same error
            raise InvalidRequest(f"an argument of {method.name} cannot be sent to the engine: {error}") from error
        call_id = next(self._ids)
        self._send(Call(call_id, method.name, packed))
        return call_id

    # Messages --------------------------------------------------------------------------------------------------------

    def _take(self, message: FromHost) -> None:
        """Act on a message; a subclass takes those that are not about calls."""
        if isinstance(message, Reply):
            self._reply(message)
        elif isinstance(message, Item):
            self._item(message)
        elif isinstance(message, End):
            if (stream := self._streams.pop(message.id, None)) is not None:
                stream.end(None)
            elif not self._over(message.id, returned=False):
                self._not_for_a_call("an End", message.id)
        elif isinstance(message, Failure):
            self._failed(message)

    def _reply(self, message: Reply) -> None:
        if self._over(message.id, returned=True):
            return
        method, reply = self._calls.pop(message.id, (None, None))
        if (stream := self._streams.pop(message.id, None)) is not None:
            self._send(Cancel(message.id))
            stream.end(WireError(f"the host answered the stream {stream.method.name} with a Reply, not with Items"))
        if method is None or reply is None or reply.done():
            return  # cancelled while the reply was under way
        try:
            reply.set_result(method.result.decode(message.result))
        except WireError as error:
            reply.set_exception(WireError(f"the engine's {method.name} returned another type than declared: {error}"))

    def _not_for_a_call(self, what: str, call_id: int) -> None:
        """Fail a plain call that got a message meant for streams, as no reply will follow."""
        method, reply = self._calls.pop(call_id, (None, None))
        if method is not None and reply is not None and not reply.done():
            self._send(Cancel(call_id))
            reply.set_exception(WireError(f"the host answered {method.name} with {what}, not with a Reply"))

    def _item(self, message: Item) -> None:
        stream = self._streams.get(message.id)
        if stream is None:
            self._not_for_a_call("an Item", message.id)
            return  # closed while the item was under way
        try:
            stream.put(stream.method.result.decode(message.value))
        except WireError as error:
            del self._streams[message.id]
            self._send(Cancel(message.id))
            stream.end(WireError(f"the engine's {stream.method.name} yielded another type than declared: {error}"))

    def _failed(self, message: Failure) -> None:
        error = self._exception(message)
        if message.id == 0:
            self.fail(lambda: exception(message))
        elif self._over(message.id, returned=False):
            return
        elif (stream := self._streams.pop(message.id, None)) is not None:
            stream.end(error)
        elif (waiting := self._calls.pop(message.id, None)) is not None and not waiting[1].done():
            waiting[1].set_exception(error)

    def _exception(self, message: Failure) -> Exception:
        """Return the exception that the waiter of a failed call gets."""
        return exception(message)


class _Stream:
    """Items of a stream that have arrived and were not read yet."""

    def __init__(self, method: Method, loop: asyncio.AbstractEventLoop) -> None:
        self.method = method
        self.items: collections.deque[object] = collections.deque()
        self.ended = False
        self.error: Exception | None = None
        self._loop = loop
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: object) -> None:
        self.items.append(item)
        self._wake()

    def end(self, error: Exception | None) -> None:
        self.ended, self.error = True, error
        self._wake()

    async def more(self) -> None:
        self._reader = self._loop.create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


async def _ended(returned: asyncio.Future[bool], undone: asyncio.Task[None], seconds: float) -> None:
    """Wait at most ``seconds`` for the end of a cancelled call, and then until it is undone."""
    await asyncio.wait([returned], timeout=seconds)
    if returned.done():
        await undone


def _ignore(reason: str) -> None:
    """Do nothing: the socket was closed on purpose."""
