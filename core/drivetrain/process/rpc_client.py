"""The calling end of a socket: calls that wait, streams that fill, and the messages that wake them.

Both hops use it: from a trainer to its host process, and from a host to a worker inside the engine.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import cast

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
        """Cancelled calls whose end is awaited. The result: true if the call had returned before it was cancelled."""
        self._transport: asyncio.Transport | None = None
        self._refusal: Callable[[], DrivetrainError] | None = None

    async def call(self, method: Method, arguments: Sequence[object]) -> object:
        """Call a method and return its result; cancelling the wait cancels the call at the other end.

        Raises:
            DrivetrainError: what the method raised, or why no reply will come.
        """
        call_id = self._send_call(method, arguments)
        reply: asyncio.Future[object] = self._loop.create_future()
        self._calls[call_id] = method, reply
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
        """Call a method as :meth:`call` does; a call that is cancelled has ended when this raises.

        Args:
            method: The method.
            arguments: Its arguments.
            seconds: Longest wait for the end of a cancelled call.
            undo: Called if the method had returned before the cancellation reached it.

        Raises:
            DrivetrainError: as for :meth:`call`.
        """
        call_id = self._send_call(method, arguments)
        reply: asyncio.Future[object] = self._loop.create_future()
        self._calls[call_id] = method, reply
        try:
            return await reply
        except asyncio.CancelledError as cancelled:
            if self._calls.pop(call_id, None) is None:
                returned = not reply.cancelled() and reply.exception() is None
            else:
                returned = await self._ended(call_id, seconds)
            if returned and undo is not None:
                try:
                    await undo()
                except DrivetrainError as error:
                    cancelled.add_note(f"{method.name} had returned, and could not be undone: {error}")
            raise

    async def _ended(self, call_id: int, seconds: float) -> bool:
        """Cancel a call and wait for its end; return True if it had returned before."""
        end = self._given_up[call_id] = self._loop.create_future()
        self._send(Cancel(call_id))
        try:
            await asyncio.wait([end], timeout=seconds)
        finally:
            del self._given_up[call_id]
        return end.done() and end.result()

    def _over(self, call_id: int, *, returned: bool) -> bool:
        """Wake who waits for the end of a cancelled call; return False if nobody does."""
        end = self._given_up.get(call_id)
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
        for call_id in self._given_up:
            self._over(call_id, returned=False)

    @property
    def refusal(self) -> DrivetrainError | None:
        """Why calls are refused; None while they are not."""
        return None if self._refusal is None else self._refusal()

    def close(self) -> None:
        """Close the socket once what was sent is written."""
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


def _ignore(reason: str) -> None:
    """Do nothing: the socket was closed on purpose."""
