"""The serving end of a socket: runs the calls of one caller, and cancels them when the caller is gone."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import cast

from drivetrain.errors import DrivetrainError, EngineInternalError, WireError
from drivetrain.process.rpc_methods import Method
from drivetrain.process.wire import Call, Cancel, End, FrameReader, FromTrainer, Item, Reply, from_trainer, read
from drivetrain.process.wire_errors import failure
from drivetrain.process.write_buffer import WriteBuffer


class RpcServer(asyncio.Protocol, ABC):
    """Serves the methods of an object to one caller. Bound to the event loop that it is made in.

    Args:
        methods: The methods that may be called, by name.
        frame_limit: Largest payload in bytes that is accepted before the handshake.
    """

    def __init__(self, methods: Mapping[str, Method], frame_limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._methods = methods
        self._frames = FrameReader(frame_limit)
        self._running: dict[int, tuple[asyncio.Task[object], list[object]]] = {}
        self._given_up: dict[int, asyncio.Task[object]] = {}
        """Calls that their caller has cancelled and that are not over."""
        self._over = False

    # For subclasses --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _target(self, call: Call) -> object:
        """Return the object whose methods are called.

        Raises:
            WireError: The handshake is not done.
        """

    def _take_other(self, message: FromTrainer) -> None:
        """Act on a message that is not about calls."""
        raise WireError(f"a {type(message).__name__} came where only calls are expected")

    def _start_call(self, call: Call, method: Method, arguments: list[object]) -> Coroutine[object, object, object]:
        """Return the coroutine of a call."""
        called = getattr(self._target(call), method.name)(*arguments)
        if method.streams:
            return self._pump(call.id, method, cast(AsyncIterator[object], called))
        return cast(Coroutine[object, object, object], called)

    def _cancelled(self, arguments: list[object]) -> None:
        """Act on a call's cancellation by its caller, beyond cancelling its task."""

    def _ended(self, code: int) -> None:
        """Act on the end of the connection: code 0 if the caller closed it, 1 if it was refused."""

    def _broke(self, code: int) -> None:
        if not self._over:
            self._over = True
            self._ended(code)

    # The socket ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writes = WriteBuffer(self._loop, self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._take(read(from_trainer, payload))
        except DrivetrainError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        for task, _ in self._running.values():
            task.cancel()
        self._broke(0)

    def _refuse(self, error: DrivetrainError) -> None:
        """Send the reason for the refusal and end."""
        self._writes.put(failure(0, error))
        self._writes.flush()
        self._transport.close()
        self._broke(1)

    # Messages --------------------------------------------------------------------------------------------------------

    def _take(self, message: FromTrainer) -> None:
        if isinstance(message, Call):
            self._call(message)
        elif isinstance(message, Cancel):
            self._cancel(message.id)
        else:
            self._take_other(message)

    def _call(self, call: Call) -> None:
        try:
            method, arguments = self._understand(call)
        except WireError as error:
            self._writes.put(failure(call.id, error))
            return
        try:
            work = self._start_call(call, method, arguments)
        except Exception as error:  # plain functions raise here, such as an unsupported stream
            self._writes.put(failure(call.id, error))
            return
        task = self._loop.create_task(work)
        self._running[call.id] = task, arguments
        task.add_done_callback(functools.partial(self._done, call.id, method))

    def _understand(self, call: Call) -> tuple[Method, list[object]]:
        method = self._methods.get(call.method)
        if method is None:
            raise WireError(f"there is no method {call.method!r}; known: {', '.join(self._methods)}")
        self._target(call)
        if call.id in self._running or call.id in self._given_up:
            raise WireError(f"call {call.id} is still running; every call needs an id of its own")
        return method, method.unpack(call.arguments)

    def _cancel(self, call_id: int) -> None:
        running = self._running.get(call_id)
        if running is None or running[0].done():
            return  # it ended while the cancellation was in transit
        del self._running[call_id]
        task, arguments = running
        self._given_up[call_id] = task
        task.cancel()
        self._cancelled(arguments)

    # Work ------------------------------------------------------------------------------------------------------------

    async def _pump(self, call_id: int, method: Method, items: AsyncIterator[object]) -> None:
        try:
            async for item in items:
                self._writes.put(Item(call_id, method.result.encode(item)))
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def _done(self, call_id: int, method: Method, task: asyncio.Task[object]) -> None:
        given_up = self._given_up.pop(call_id, None) is not None and not self._over
        waited_for = self._running.pop(call_id, None) is not None and not self._over
        if given_up and not method.streams:
            if task.cancelled() or task.exception() is not None:
                self._writes.put(End(call_id))
            else:
                waited_for = True  # the call returned nevertheless
        if task.cancelled():
            if waited_for:
                self._writes.put(failure(call_id, EngineInternalError(f"the engine cancelled {method.name} by itself")))
            return
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            self._broke(1)  # SystemExit propagates through the event loop; the exit code tells more than a reply
        elif not waited_for:
            return
        elif error is not None:
            self._writes.put(failure(call_id, error))
        elif method.streams:
            self._writes.put(End(call_id))
        else:
            try:
                self._writes.put(Reply(call_id, method.result.encode(task.result())))
            except WireError as unsendable:
                message = f"what the engine's {method.name} returned cannot be sent: {unsendable}"
                self._writes.put(failure(call_id, EngineInternalError(message)))
