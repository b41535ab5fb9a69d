"""The host's event loop: owns one backend and serves calls from one socket until it closes."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Final, cast

from drivetrain.backend.base import Backend, GenerateRequest, ModelInfo, TokenDelta
from drivetrain.backend.registry import load_backend
from drivetrain.backend.toolkit.stall_watch import ended
from drivetrain.errors import DrivetrainError, EngineInternalError, UnsupportedCapability, WireError
from drivetrain.process.handshake import check_version, hello, installed, opened_config
from drivetrain.process.heartbeat import Watch
from drivetrain.process.process_tree import end_own_family
from drivetrain.process.rpc_methods import METHODS, Method
from drivetrain.process.wire import (
    FRAME_LIMIT,
    Call,
    Cancel,
    End,
    FrameReader,
    FromTrainer,
    Item,
    Open,
    Progress,
    Reply,
    Welcome,
    from_trainer,
    read,
)
from drivetrain.process.wire_errors import failure
from drivetrain.process.write_buffer import WriteBuffer

_logger = logging.getLogger("drivetrain.host")
_TICK_S: Final = 0.2


def serve(call_fd: int, watch_fd: int, period: float, patience: float) -> int:
    """Serve the socket ``call_fd`` until it closes; return the exit code.

    ``watch_fd`` is the socket for heartbeats, one every ``period`` seconds. If a process of the engine is stopped for
    longer than ``patience`` seconds, the engine counts as dead.
    """
    for fd in (call_fd, watch_fd):
        os.set_inheritable(fd, False)  # the engine's processes must not keep the socket open after this one
    watch = Watch(socket.socket(fileno=watch_fd), period, patience)
    watch.start()
    try:
        return asyncio.run(_serve(socket.socket(fileno=call_fd), watch))
    finally:
        end_own_family()


async def _serve(call_socket: socket.socket, watch: Watch) -> int:
    loop = asyncio.get_running_loop()
    connection = Connection(watch)
    call_socket.setblocking(False)
    await loop.create_unix_connection(lambda: connection, sock=call_socket)
    while not connection.over.done():
        watch.tick()
        await asyncio.wait([connection.over], timeout=_TICK_S)
    return connection.over.result()


class Connection(asyncio.Protocol):
    """Connection of one trainer to one backend. ``over`` resolves to the host's exit code."""

    def __init__(self, watch: Watch) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[int] = self._loop.create_future()
        self._watch = watch
        self._frames = FrameReader()
        self._backend: Backend | None = None
        self._running: dict[int, tuple[asyncio.Task[object], GenerateRequest | None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._vigil: asyncio.Task[None] | None = None

    # The socket ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writes = WriteBuffer(self._loop, self._transport)
        self._writes.put(hello())

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._take(read(from_trainer, payload))
        except WireError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        for task, _ in self._running.values():
            task.cancel()
        self._end(0)

    def _refuse(self, error: DrivetrainError) -> None:
        """Send the reason for the refusal and end."""
        self._writes.put(failure(0, error))
        self._writes.flush()
        self._transport.close()
        self._end(1)

    def _end(self, code: int) -> None:
        if not self.over.done():
            self.over.set_result(code)

    # Messages --------------------------------------------------------------------------------------------------------

    def _take(self, message: FromTrainer) -> None:
        if isinstance(message, Call):
            self._call(message)
        elif isinstance(message, Cancel):
            self._cancel(message.id)
        else:
            self._open(message)

    def _open(self, opened: Open) -> None:
        check_version("the trainer", opened.wire_version, opened.drivetrain)
        if self._backend is not None:
            raise WireError("a second Open came on one connection; a host serves one backend")
        sys.path += [folder for folder in opened.import_path if folder not in sys.path]
        try:
            cls = load_backend(opened.backend)
            self._backend = backend = cls(opened_config(opened))
        except Exception as error:  # a plugin's constructor may raise anything; report it like its methods' errors
            self._writes.put(failure(0, error))
            return
        self._frames.limit = FRAME_LIMIT
        self._writes.put(
            Welcome(cls.name, cls.engine_distribution, installed(cls.engine_distribution), backend.native_stops)
        )

    def _call(self, call: Call) -> None:
        try:
            method, arguments = self._understand(call)
        except WireError as error:
            self._writes.put(failure(call.id, error))
            return
        try:
            work = self._work(call.id, method, arguments)
        except Exception as error:  # plain functions raise here, such as an unsupported stream
            self._writes.put(failure(call.id, error))
            return
        task = self._loop.create_task(work)
        request = arguments[0] if arguments and isinstance(arguments[0], GenerateRequest) else None
        self._running[call.id] = task, request
        task.add_done_callback(functools.partial(self._done, call.id, method))

    def _work(self, call_id: int, method: Method, arguments: list[object]) -> Coroutine[object, object, object]:
        assert self._backend is not None
        if method.name == "start":
            return self._start(self._backend)
        if method.name == "close":
            if self._vigil is not None:
                self._vigil.cancel()
            self._watch.engine_closing()
        called = getattr(self._backend, method.name)(*arguments)
        if method.streams:
            return self._pump(call_id, method, cast(AsyncIterator[TokenDelta], called))
        return cast(Coroutine[object, object, object], called)

    def _understand(self, call: Call) -> tuple[Method, list[object]]:
        method = METHODS.get(call.method)
        if method is None:
            raise WireError(f"there is no method {call.method!r}; known: {', '.join(METHODS)}")
        if self._backend is None:
            raise WireError(f"{call.method} was called before Open was answered with Welcome")
        if call.id in self._running:
            raise WireError(f"call {call.id} is still running; every call needs an id of its own")
        return method, method.unpack(call.arguments)

    def _cancel(self, call_id: int) -> None:
        running = self._running.pop(call_id, None)
        if running is None:
            return  # it ended while the cancellation was in transit
        task, request = running
        task.cancel()
        if request is not None:
            abort = self._loop.create_task(self._abort(request.request_id))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        assert self._backend is not None
        try:
            await self._backend.abort([request_id])
        except UnsupportedCapability:
            return  # cancelling the call has to suffice
        except Exception:  # the caller has gone, so the error can only be logged
            _logger.exception("aborting the cancelled request %r failed", request_id)

    # Work ------------------------------------------------------------------------------------------------------------

    async def _start(self, backend: Backend) -> ModelInfo:
        info = await backend.start(self._report)
        # Objects from the start live as long as the engine; a full collection would scan them again and again.
        gc.collect()
        gc.freeze()
        self._watch.engine_started(backend.child_processes())
        self._vigil = self._loop.create_task(self._await_death(backend))
        return info

    async def _await_death(self, backend: Backend) -> None:
        try:
            error: BaseException = await ended(backend, self._requests)
        except Exception as raised:  # a backend that cannot watch its engine counts as dead
            error = raised
        self._watch.engine_died(f"says that its engine died: {error}")

    def _requests(self) -> int:
        return sum(request is not None for _, request in self._running.values())

    def _report(self, text: str) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._writes.put(Progress(text))
            # Engines load their model in the event loop, so without a flush this would be sent only afterwards.
            self._writes.flush()
        else:
            self._loop.call_soon_threadsafe(self._writes.put, Progress(text))

    async def _pump(self, call_id: int, method: Method, items: AsyncIterator[TokenDelta]) -> None:
        try:
            async for item in items:
                self._writes.put(Item(call_id, method.result.encode(item)))
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def _done(self, call_id: int, method: Method, task: asyncio.Task[object]) -> None:
        waited_for = self._running.pop(call_id, None) is not None and not self.over.done()
        if task.cancelled():
            if waited_for:
                self._writes.put(failure(call_id, EngineInternalError(f"the engine cancelled {method.name} by itself")))
            return
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            self._end(1)  # SystemExit propagates through the event loop; the exit code tells more than a reply
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


__all__ = ["Connection", "serve"]
