"""The status of one engine, and the gates and locks that follow from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.counts import StateTimes
from drivetrain.engine.states import EngineState, EngineStatus
from drivetrain.engine.validation import require
from drivetrain.errors import EngineStateError
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig


class Controller:
    """Holds the status of one engine and decides who may change it, and when.

    It does no I/O. The parts that call the backend ask it for permission first and report the new status afterwards.
    """

    def __init__(self, config: EngineConfig, capabilities: frozenset[Capability]) -> None:
        self.config = config
        self.capabilities = capabilities
        self._status = EngineStatus()
        self.times = StateTimes()
        self._holds = 0
        self._transition = asyncio.Lock()
        self._weights = asyncio.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    # Status ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        """The current status."""
        return self._status

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change of the status, of the weight version or of the adapters."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` no longer."""
        self._listeners.remove(listener)

    def starting(self) -> None:
        """CREATED → STARTING. The engine belongs to the running event loop from now on.

        Raises:
            EngineStateError: the engine was started before.
        """
        self._status = self._status.start()
        self._loop = asyncio.get_running_loop()

    def started(self) -> None:
        """STARTING → READY."""
        self._status = self._status.started()

    def fail(self, why: str, *, died: bool = False) -> None:
        """Any state → FAILED; a closed engine stays closed. With ``died``, later calls raise ``EngineDied``."""
        self._status = self._status.fail(why, died=died)
        self.notify()

    def close(self) -> None:
        """Any state → CLOSED."""
        self._status = self._status.close()
        self.notify()

    def move_to(self, status: EngineStatus) -> None:
        """Take the next status. A failed or closed engine ignores it."""
        if self._status.state in (EngineState.FAILED, EngineState.CLOSED):
            return
        self._status = status
        self.notify()

    def notify(self) -> None:
        """Call every listener: the status changed, or something else that a holder of the engine is told of."""
        self.times.look(self._status)
        for listener in tuple(self._listeners):
            listener()

    # Permission --------------------------------------------------------------------------------------------------

    def require_own_loop(self, action: str) -> None:
        """Raise unless the running event loop is the one that the engine was started in."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise EngineStateError(
                f"{action} was called in another event loop than the engine was started in; use one loop (one "
                "asyncio.run) for all of an engine's life, or drivetrain.sync_engine",
                state=self._status.state.value,
            )

    def require(self, action: str, capability: Capability) -> None:
        """Raise unless the engine is open and claims ``capability``."""
        self._status.require_open(action)
        self.require_own_loop(action)
        self.require_claimed(action, capability)

    def require_claimed(self, action: str, capability: Capability) -> None:
        """Raise :class:`UnsupportedCapability` unless the engine claims ``capability``."""
        require(self.capabilities, capability, action, self.config.backend)

    def require_admission(self, action: str) -> None:
        """Raise unless a request that arrives now is served, or may wait at the gate."""
        self._status.require_admission(action)
        self.require_own_loop(action)

    def not_started(self, action: str) -> EngineStateError:
        """Make the error for ``action``, which is known only after start."""
        return EngineStateError(
            f"{action} is not known before the engine is started: 'await engine.start()' or 'async with engine:'",
            state=self._status.state.value,
        )

    # The gate ----------------------------------------------------------------------------------------------------

    def holds_requests(self) -> bool:
        """Return True while admitted requests must wait at the gate.

        Raises:
            EngineDied: the engine died, so waiting is pointless.
            EngineStateError: the engine was closed.
        """
        self._status.require_open("a waiting request")
        return self._holds > 0 or self._status.holds_requests

    @contextmanager
    def shut_gate(self) -> Generator[None, None, None]:
        """Hold every request that arrives inside the block, in any status."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self.notify()

    # Locks and deadlines -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def controlling(self, action: str) -> AsyncGenerator[None, None]:
        """Allow one change of state at a time.

        Raises:
            DeadlineExceeded: another change took longer than ``timeouts.control``.
            EngineStateError: this is another event loop than the engine's.
        """
        self.require_own_loop(action)
        async with deadline(self.config.timeouts.control, f"another change of state to end before {action}"):
            await self._transition.acquire()
        try:
            yield
        finally:
            self._transition.release()

    @asynccontextmanager
    async def owning_weights(self, action: str) -> AsyncGenerator[None, None]:
        """Allow one weight update, save or sleep of the weights at a time; other changes of state are not blocked.

        Enter it before :meth:`controlling`, never within.

        Raises:
            DeadlineExceeded: another owner took longer than ``timeouts.weight_update``.
            EngineStateError: this is another event loop than the engine's.
        """
        self.require_own_loop(action)
        seconds = self.config.timeouts.weight_update
        async with deadline(seconds, f"a weight update or a save to end before {action}"):
            await self._weights.acquire()
        try:
            yield
        finally:
            self._weights.release()

    def bounded(self, waited_for: str) -> AbstractAsyncContextManager[None]:
        """Bound the waits in this context by ``timeouts.control``."""
        return deadline(self.config.timeouts.control, waited_for)
