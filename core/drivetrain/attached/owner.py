"""The owner of an attached engine, as a holder reaches it: one connection, made again when it breaks."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Final

from drivetrain.attached.connection import Connected, OwnerConnection, connect
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.shared_state import EngineFacts, SharedState
from drivetrain.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DrivetrainError,
    EngineDied,
    EngineError,
    EngineStateError,
    WireError,
)
from drivetrain.process.rpc_methods import SHARED_METHODS
from drivetrain.types.handle import EngineHandle

_logger = logging.getLogger("drivetrain.engine")
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
REPEATED: Final = frozenset(
    {"stats", "tokenizer_files", "weight_manifest", "get_weights_by_name", "validate_weights", "read_media", "embed"}
    | {"reward_score"}
)
"""Calls that change nothing, so that they are sent again when the connection broke."""
_LEFT_AT_ONCE: Final = REPEATED | {"generate"}
"""Calls whose end a caller that is cancelled does not wait for: they leave the engine's state as it is."""
_UNDONE_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "prepare_weight_update": ("forget_weight_update",),
    "begin_update": ("break_off_update", "its begin was cancelled"),
}
"""Calls that leave something to their caller, each with the call that ends it for a caller that was cancelled."""


class Owner:
    """Calls the owner of one engine. Bound to the event loop that :meth:`start` runs in.

    A cancelled call that may change the engine has ended there when ``CancelledError`` is raised, so that the state is
    no older than the call. The wait for its end is bounded by ``timeouts.close``. If the reply comes later, a begun
    update is broken off then, and a prepared one dropped.

    When the connection breaks, it is made again within ``timeouts.heartbeat``; calls wait meanwhile. Calls that were
    under way then raise :class:`ConnectionLost`, unless they change nothing: those are sent again. If no connection can
    be made, or another engine answers, every call raises :class:`EngineDied`.

    Args:
        handle: The owner's address and key.
        facts: The engine that is expected there.
        on_state: Called with the engine's state at each connection and change.
    """

    def __init__(self, handle: EngineHandle, facts: EngineFacts, on_state: Callable[[SharedState], None]) -> None:
        self.handle = handle
        self.facts = facts
        self.connections = 0
        """Number of connections made so far. The owner has dropped everything that it held for an earlier one."""
        self._on_state = on_state
        self._patience = facts.config.timeouts.heartbeat
        self._attempt = object()
        """Identifies the newest attempt to connect; earlier ones report no loss."""
        self.connected: Connected | None = None
        """The connection in use, or the last one; None before :meth:`start`."""
        self._back: asyncio.Future[None] | None = None
        """While a broken connection is made again: done when it is, or when that has failed."""
        self._reconnecting: asyncio.Task[None] | None = None
        self._closing = False
        self._died: asyncio.Future[EngineError] | None = None
        self._preparations = 0
        """Number of calls of ``prepare_weight_update`` so far."""

    async def start(self, patience: float) -> None:
        """Connect within ``patience`` seconds.

        Raises:
            DrivetrainError: as for :func:`connect`.
            EngineDied: Another engine listens there by now.
        """
        self._loop = asyncio.get_running_loop()
        self._died = self._loop.create_future()
        self.connected = await self._connect(patience)

    async def _connect(self, patience: float) -> Connected:
        attempt = self._attempt = object()

        def lost(reason: str) -> None:
            if attempt is self._attempt:
                self._lost(reason)

        connected = await connect(self.handle, self._on_state, lost, patience)
        if connected.facts.instance != self.facts.instance:
            await connected.close()
            raise EngineDied(f"another engine answers at {self.handle.address} now; attach to it")
        self.connections += 1
        return connected

    async def died(self) -> EngineError:
        """Wait until the owner is gone, and return the error that says so."""
        assert self._died is not None
        return await asyncio.shield(self._died)

    # Calls -----------------------------------------------------------------------------------------------------------

    async def call(self, name: str, *arguments: object) -> object:
        """Call a method of :class:`~drivetrain.process.shared_engine.SharedEngine`."""
        while True:
            connected = await self._usable(name)
            try:
                return await self._call(connected.connection, name, arguments)
            except ConnectionLost:
                if name not in REPEATED:
                    raise

    async def _call(self, connection: OwnerConnection, name: str, arguments: tuple[object, ...]) -> object:
        method = SHARED_METHODS[name]
        if name in _LEFT_AT_ONCE:
            return await connection.call(method, arguments)
        seconds = self.facts.config.timeouts.close
        self._preparations += name == "prepare_weight_update"
        undo = functools.partial(self._undo, connection, name, self._preparations) if name in _UNDONE_BY else None
        return await connection.call_to_its_end(method, arguments, seconds, undo)

    async def _undo(self, connection: OwnerConnection, name: str, preparations: int) -> None:
        if name == "prepare_weight_update" and preparations != self._preparations:
            return  # a later update has replaced the prepared one
        undone_by, *arguments = _UNDONE_BY[name]
        async with deadline(self.facts.config.timeouts.control, f"the engine's owner to undo {name}"):
            await connection.call(SHARED_METHODS[undone_by], arguments)

    async def stream(self, name: str, *arguments: object) -> AsyncGenerator[object, None]:
        """Call a method that yields."""
        connected = await self._usable(name)
        async with aclosing(connected.connection.stream(SHARED_METHODS[name], arguments)) as items:
            async for item in items:
                yield item

    async def _usable(self, name: str) -> Connected:
        if self._back is not None:
            await asyncio.shield(self._back)
        if self.connected is None:
            raise EngineStateError(
                f"{name}() is refused: the engine is created; await engine.start() first", state="created"
            )
        return self.connected

    # Loss ------------------------------------------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        if self._closing or self._back is not None or self.connected is None:
            return
        _logger.warning("the owner of the engine at %s %s", self.handle.address, reason)
        self.connected.connection.abort()
        self._back = self._loop.create_future()
        self._reconnecting = self._loop.create_task(self._reconnect(self.connected, reason))

    async def _reconnect(self, before: Connected, reason: str) -> None:
        await asyncio.to_thread(before.pulse.stop)
        try:
            if (said := before.connection.refusal) is not None:  # the owner said why it ends
                raise said
            self.connected = await self._connect_again()
        except EngineDied as error:
            self._end(before, str(error))
        except DrivetrainError as error:
            self._end(before, f"the owner of the engine at {self.handle.address} {reason}: {error}")
        else:
            again = (
                f"the connection to the engine at {self.handle.address} broke and was made again: its owner {reason}"
            )
            before.connection.fail(functools.partial(ConnectionLost, f"{again}. The call may have taken effect"))
        back, self._back = self._back, None
        assert back is not None
        back.set_result(None)

    def _end(self, last: Connected, why: str) -> None:
        """Fail every call: the owner is gone."""
        assert self._died is not None
        self._died.set_result(EngineDied(why))
        last.connection.fail(functools.partial(EngineDied, why))

    async def _connect_again(self) -> Connected:
        ends = self._loop.time() + self._patience
        pause = _FIRST_PAUSE_S
        while True:
            left = ends - self._loop.time()
            try:
                return await self._connect(max(left, _FIRST_PAUSE_S))
            except (WireError, EngineDied, DeadlineExceeded):
                raise
            except EngineStateError as error:
                # A refused connection or a missing socket means that the owner has ended. Other errors may pass.
                if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError) or left < pause:
                    raise
            except ConnectionLost:  # during the handshake; the next one may succeed
                if left < pause:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Detach; calls that wait raise :class:`EngineStateError`."""
        self._closing = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
            if self._back is not None:
                self._back.set_result(None)
                self._back = None
        if self.connected is not None:
            words = "the call is refused: the engine is closed, since this process detached from it"
            detached = functools.partial(EngineStateError, words, state="closed")
            self.connected.connection.fail(detached)
            await self.connected.close()
