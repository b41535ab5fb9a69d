"""The host's event loop: owns one backend and serves calls from one socket until it closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from typing import Final

from drivetrain.backend.base import Backend, GenerateRequest, ModelInfo
from drivetrain.backend.registry import load_backend
from drivetrain.backend.toolkit.stall_watch import ended
from drivetrain.errors import UnsupportedCapability, WireError
from drivetrain.process.handshake import check_version, hello, installed, opened_config
from drivetrain.process.heartbeat import Watch
from drivetrain.process.process_tree import end_own_family
from drivetrain.process.rpc_methods import METHODS, Method
from drivetrain.process.rpc_server import RpcServer
from drivetrain.process.wire import FRAME_LIMIT, HANDSHAKE_LIMIT, Call, FromTrainer, Open, Progress, Welcome
from drivetrain.process.wire_errors import failure
from drivetrain.types.config import Isolation

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


class Connection(RpcServer):
    """Connection of one trainer to one backend. ``over`` resolves to the host's exit code."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(METHODS, HANDSHAKE_LIMIT)
        self.over: asyncio.Future[int] = self._loop.create_future()
        self._watch = watch
        self._backend: Backend | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._vigil: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._writes.put(hello())

    def _ended(self, code: int) -> None:
        self.over.set_result(code)

    # Messages --------------------------------------------------------------------------------------------------------

    def _take_other(self, message: FromTrainer) -> None:
        assert isinstance(message, Open)
        check_version("the trainer", message.wire_version, message.drivetrain)
        if self._backend is not None:
            raise WireError("a second Open came on one connection; a host serves one backend")
        sys.path += [folder for folder in message.import_path if folder not in sys.path]
        try:
            cls = load_backend(message.backend)
            self._backend = backend = cls(opened_config(message).model_copy(update={"isolation": Isolation.PROCESS}))
        except Exception as error:  # a plugin's constructor may raise anything; report it like its methods' errors
            self._writes.put(failure(0, error))
            return
        self._frames.limit = FRAME_LIMIT
        self._writes.put(
            Welcome(
                cls.name,
                cls.engine_distribution,
                installed(cls.engine_distribution),
                backend.native_stops,
                backend.counts_resumed_tokens,
            )
        )

    def _target(self, call: Call) -> Backend:
        if self._backend is None:
            raise WireError(f"{call.method} was called before Open was answered with Welcome")
        return self._backend

    def _start_call(self, call: Call, method: Method, arguments: list[object]) -> Coroutine[object, object, object]:
        if method.name == "start":
            return self._start(self._target(call))
        if method.name == "close":
            if self._vigil is not None:
                self._vigil.cancel()
            self._watch.engine_closing()
        return super()._start_call(call, method, arguments)

    def _cancelled(self, arguments: list[object]) -> None:
        request = _request_of(arguments)
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
        return sum(_request_of(arguments) is not None for _, arguments in self._running.values())

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


def _request_of(arguments: list[object]) -> GenerateRequest | None:
    first = arguments[0] if arguments else None
    return first if isinstance(first, GenerateRequest) else None
