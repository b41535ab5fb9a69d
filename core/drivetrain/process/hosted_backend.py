"""The trainer's side: a ``Backend`` whose engine runs in a host process."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Final, TypeVar, cast

from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.backend.registry import load_backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineDied,
    EngineInternalError,
    EngineStartError,
    EngineStateError,
)
from drivetrain.process.capability_probe import probe
from drivetrain.process.handshake import check_version, open_for
from drivetrain.process.host_connection import HostConnection
from drivetrain.process.host_log import with_end_of_log
from drivetrain.process.host_process import Ending, HostProcess
from drivetrain.process.host_python import why_not
from drivetrain.process.rpc_methods import METHODS
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.weights import ApplyUpdate, WeightReply

F = TypeVar("F", bound=Callable[..., Coroutine[None, None, object]])

_logger = logging.getLogger("drivetrain.host")
_GENERATE: Final = METHODS["generate"]
_STREAM: Final = METHODS["stream"]
_STATS: Final = METHODS["stats"]
_APPLY: Final = METHODS["apply_weights"]
_START: Final = METHODS["start"]
_CLOSE: Final = METHODS["close"]
_RECENT_S: Final = 120.0
_GRACE_S: Final = 1.0


def _remote(function: F) -> F:
    """Return a method with the signature of ``function``, a coroutine of the Backend page, that calls the host's."""
    method = METHODS[function.__name__]

    @functools.wraps(function)
    async def call(self: HostedBackend, *arguments: object, **named: object) -> object:
        bound = method.signature.bind(self, *arguments, **named)
        return await self._connected().call(method, bound.args[1:])

    return cast(F, call)


class HostedBackend(Backend):
    """A backend in a host process; every coroutine of ``Backend`` is called over the wire.

    It is bound to the event loop in which ``start`` runs. If the host dies, every pending and later call raises
    :class:`EngineDied` with the reason, the first exception in the host's log and the last lines. All its processes are
    killed.
    ``native_stops`` and ``counts_resumed_tokens`` are the real backend's once ``start`` has returned.

    Args:
        config: ``python`` names the environment that holds the engine; None: this one. ``timeouts`` bound the watch.
        backend_name: Name of the real backend in the host's environment.
    """

    name = "hosted"
    engine_distribution = "drivetrain"

    def __init__(self, config: EngineConfig, backend_name: str) -> None:
        super().__init__(config)
        # A class variable on the Backend page, set per instance here: this class stands in for any backend.
        self.name = backend_name
        self._host: HostProcess | None = None
        self._connection: HostConnection | None = None
        self._started = False
        self._closing: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        if config.python is not None:
            return probe(config).capabilities
        return load_backend(config.backend).capabilities(config)

    @property
    def pid(self) -> int | None:
        """Process id of the host; None before ``start``."""
        return self._host.pid if self._host is not None else None

    def child_processes(self) -> list[int]:
        return [] if self._host is None or self._gone.done() else [self._host.pid]

    async def died(self) -> EngineDied:
        """Wait until the host dies and return the reason; never return after a requested close.

        Raises:
            EngineStateError: The engine was not started.
        """
        self._connected()
        return await asyncio.shield(self._died)

    # Calls -----------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return cast(GenerateResult, await self._connected().call(_GENERATE, (request,)))

    async def stats(self) -> EngineStats:
        return cast(EngineStats, await self._connected().call(_STATS, ()))

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        return cast(WeightReply, await self._connected().call(_APPLY, (update,)))

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        return cast(AsyncGenerator[TokenDelta, None], self._connected().stream(_STREAM, (request,)))

    read_media = _remote(Backend.read_media)
    abort = _remote(Backend.abort)
    freeze = _remote(Backend.freeze)
    unfreeze = _remote(Backend.unfreeze)
    sleep = _remote(Backend.sleep)
    wake_up = _remote(Backend.wake_up)
    reset_prefix_cache = _remote(Backend.reset_prefix_cache)
    clear_hicache_storage = _remote(Backend.clear_hicache_storage)
    weight_manifest = _remote(Backend.weight_manifest)
    receive_weights = _remote(Backend.receive_weights)
    validate_weights = _remote(Backend.validate_weights)
    set_weight_version = _remote(Backend.set_weight_version)
    init_communicator = _remote(Backend.init_communicator)
    destroy_communicator = _remote(Backend.destroy_communicator)
    read_weight = _remote(Backend.read_weight)
    save_sharded = _remote(Backend.save_sharded)
    save_remote = _remote(Backend.save_remote)
    load_lora_adapter = _remote(Backend.load_lora_adapter)
    load_lora_tensors = _remote(Backend.load_lora_tensors)
    unload_lora_adapter = _remote(Backend.unload_lora_adapter)
    embed = _remote(Backend.embed)
    reward_score = _remote(Backend.reward_score)
    start_profile = _remote(Backend.start_profile)
    stop_profile = _remote(Backend.stop_profile)

    def _connected(self) -> HostConnection:
        if self._connection is None:
            raise EngineStateError(f"the {self.name} engine was not started", state="starting")
        return self._connection

    # Start -----------------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start the host process and the engine in it.

        Raises:
            EngineStartError: One of them did not start; the message says how the host ended, names the first exception
                in its log and shows the last lines.
            WireError: The host speaks another version of the protocol.
            DeadlineExceeded: The start took longer than ``timeouts.start`` seconds.
            DrivetrainError: The backend's own ``start`` raised it.
        """
        if self._host is not None:
            raise EngineStateError(f"the {self.name} engine was started before; make a new one", state="started")
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[Ending] = self._loop.create_future()
        self._died: asyncio.Future[EngineDied] = self._loop.create_future()
        self._connection = HostConnection(report, self._trouble, self._with_log)
        self._host = host = HostProcess(self.config.python, self.config.timeouts, self._on_end)
        try:
            await self._loop.create_unix_connection(self._connected, sock=host.socket)
            async with deadline(self.config.timeouts.start, f"the {self.name} engine to start in its host process"):
                info = await self._bring_up(host, self._connection)
        except DrivetrainError as error:
            died = self._gone.done()
            await self.close()
            if died or not isinstance(error, EngineStartError | EngineInternalError | DeadlineExceeded):
                raise
            kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else EngineStartError
            raise kind(with_end_of_log(str(error), (await self._gone).log.lines())) from error
        except BaseException:
            host.condemn("was ended because its start was cancelled")
            await asyncio.shield(self._gone)
            host.socket.close()  # a connection that was cancelled while connecting does not own the socket
            self._closed = True
            raise
        self._started = True
        host.started()
        return info

    async def _bring_up(self, host: HostProcess, connection: HostConnection) -> ModelInfo:
        hello = await connection.hello
        try:
            check_version(
                f"the host process ({self.config.python or 'this Python'})", hello.wire_version, hello.drivetrain
            )
        except DrivetrainError:
            host.condemn("speaks another version of the wire protocol")
            raise
        connection.open(open_for(self.config, self.name))
        welcome = await connection.welcome
        self.native_stops = welcome.native_stops
        self.counts_resumed_tokens = welcome.counts_resumed_tokens
        self.engine_distribution = welcome.engine_distribution
        return cast(ModelInfo, await connection.call(_START, ()))

    # End -------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the engine and its host; kill the host after ``timeouts.close`` seconds. Idempotent.

        Raises:
            DrivetrainError: The backend's own ``close`` raised it; the host is gone nevertheless.
        """
        if self._host is None or self._closed:
            return
        if asyncio.get_running_loop() is not self._loop:
            # The connection's event loop is another one and may be closed, so the process can only be killed.
            self._host.condemn("was closed from another event loop than it was started in")
            self._host.join()
            self._host.socket.close()
            self._closed = True
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(self._host, self._connected()))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._host.condemn("was ended because closing it was cancelled")
            raise

    async def _close(self, host: HostProcess, connection: HostConnection) -> None:
        failed: DrivetrainError | None = None
        try:
            async with asyncio.timeout(self.config.timeouts.close):
                if connection.welcome.done() and not self._gone.done():
                    await connection.call(_CLOSE, ())
                connection.close()
                await asyncio.shield(self._gone)
        except DrivetrainError as error:
            if self._gone.done():
                _logger.warning("the host process %d %s before it was closed", host.pid, self._gone.result().reason)
            else:
                failed = error
        except TimeoutError:
            _logger.warning(
                "the host process %d did not close within %g s (timeouts.close) and was killed",
                host.pid,
                self.config.timeouts.close,
            )
        finally:
            host.condemn("did not close when asked")
        await asyncio.shield(self._gone)
        self._closed = True
        if failed is not None:
            raise failed

    def _trouble(self, reason: str) -> None:
        """Condemn the host whose call socket broke, after a moment: if the host is ending, its exit code says more."""
        host = self._host
        if host is not None:
            self._loop.call_later(_GRACE_S, host.condemn, reason)

    def _with_log(self, what: str) -> str:
        if self._host is None:
            return what
        log = self._host.log
        # An engine that has served for days may have logged exceptions that it survived.
        recent = log.lines(_RECENT_S) if self._started else None
        return with_end_of_log(what, log.lines(), recent)

    def _on_end(self, ending: Ending) -> None:
        """Pass the host's end on to the event loop; called in the watching thread."""
        try:
            self._loop.call_soon_threadsafe(self._ended, ending)
        except RuntimeError:
            _logger.debug("the event loop of host process %s was closed before its engine", self.pid)

    def _ended(self, ending: Ending) -> None:
        error: Callable[[], DrivetrainError]
        if self._started and self._closing is None:
            error = functools.partial(EngineDied, self._what_happened(ending, ""))
            self._died.set_result(EngineDied(self._what_happened(ending, "")))
        elif self._closing is None:
            error = functools.partial(EngineStartError, self._what_happened(ending, " while starting"))
        else:
            error = functools.partial(EngineStateError, f"the {self.name} engine is closed", state="closed")
        connection, host = self._connected(), self._host
        assert host is not None
        connection.fail(error)
        connection.abort()
        host.join()
        self._gone.set_result(ending)

    def _what_happened(self, ending: Ending, when: str) -> str:
        remedy = why_not(self.config.python, ending.log.lines())
        what = f"the host process {self.pid} of the {self.name} engine {ending.reason}{when}"
        return self._with_log(f"{what}; {remedy}" if remedy else what)
