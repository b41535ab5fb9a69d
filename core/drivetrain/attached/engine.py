"""The page of an engine that another process owns."""

from __future__ import annotations

import logging
from typing import Final, Self

from drivetrain.attached.backend import AttachedBackend
from drivetrain.attached.connection import connect
from drivetrain.attached.parts import (
    AttachedAdapters,
    AttachedCommunicators,
    AttachedController,
    AttachedGeneration,
    AttachedLoadedAdapters,
    AttachedPauses,
    AttachedUpdates,
    AttachedWeights,
)
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.engine.shared_state import EngineFacts, SharedState, this_machine
from drivetrain.engine.validation import check_seconds
from drivetrain.errors import EngineStateError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain.types.handle import EngineHandle

_logger = logging.getLogger("drivetrain.engine")
_PATIENCE_S: Final = 30.0
_KINDS: Final = PartKinds(
    controller=AttachedController,
    loaded_adapters=AttachedLoadedAdapters,
    pauses=AttachedPauses,
    weights=AttachedWeights,
    updates=AttachedUpdates,
    communicators=AttachedCommunicators,
    adapters=AttachedAdapters,
    generation=AttachedGeneration,
)


class AttachedEngine(InferenceEngine):
    """An engine that another process owns: the same page. Made by :func:`attach`.

    Prompts are tokenised and texts cut in this process; states, gates and versions are the owner's. ``teardown``
    detaches: the engine goes on. Sessions are this holder's own.
    """

    def __init__(self, facts: EngineFacts, backend: AttachedBackend) -> None:
        capabilities = frozenset(one for one in Capability if one.value in facts.capabilities)
        if facts.machine != this_machine():
            capabilities -= {Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_CUDA_IPC}
        super().__init__(
            facts.config,
            backend,
            capabilities=capabilities,
            isolation=Isolation.PROCESS,
            versions=dict(facts.versions),
        )
        self.parts = _KINDS.build(facts.config, backend, capabilities)

    def adopt(self, state: SharedState) -> None:
        """Take the state that the owner reported."""
        parts = self.parts
        assert isinstance(parts.controller, AttachedController)
        assert isinstance(parts.loaded_adapters, AttachedLoadedAdapters)
        parts.loaded_adapters.adopt(state.adapters)
        parts.weights.publish(state.version)
        parts.controller.adopt(state.status)

    def lose(self, reason: str) -> None:
        """Fail every waiting call: the owner is gone."""
        assert isinstance(self.parts.backend, AttachedBackend)
        self.parts.backend.lost(reason)

    async def handle(
        self, listen: str | None = None, *, key: str | None = None, announce: str | None = None
    ) -> EngineHandle:
        """Return the handle that this engine was attached by; its owner makes new ones."""
        if listen is not None or key is not None or announce is not None:
            raise EngineStateError(
                "only the owner of an engine listens for holders; this process is attached to it",
                state=self.state.value,
            )
        assert isinstance(self.parts.backend, AttachedBackend)
        return self.parts.backend.handle

    async def __aenter__(self) -> Self:
        return self


async def attach(handle: EngineHandle, *, timeout: float | None = None) -> AttachedEngine:
    """Attach to an engine that another process owns; return its page, ready for use.

    Args:
        handle: The value that the owner's ``engine.handle()`` returned.
        timeout: Seconds to connect within; 30 if not given.

    Raises:
        InvalidRequest: It is no handle.
        EngineStateError: The engine was closed, or its owner has ended.
        WireError: The key is wrong, or the owner has another version of drivetrain.
        DeadlineExceeded: The owner does not answer in time.
    """
    if not isinstance(handle, EngineHandle):
        raise InvalidRequest(f"handle={shown(handle)}: expected what engine.handle() returns", field="handle")
    patience = check_seconds(timeout, _PATIENCE_S)
    news = _News()
    connection, facts, pulse = await connect(handle, news.take_state, news.take_loss, patience)
    engine = AttachedEngine(facts, AttachedBackend(handle, connection, facts, pulse))
    await engine.start()
    news.pass_to(engine)
    return engine


class _News:
    """Keeps the owner's newest state, and its loss, until there is an engine to pass them to."""

    def __init__(self) -> None:
        self._engine: AttachedEngine | None = None
        self._state: SharedState | None = None
        self._loss = ""

    def take_state(self, state: SharedState) -> None:
        self._state = state
        if self._engine is not None:
            self._engine.adopt(state)

    def take_loss(self, reason: str) -> None:
        self._loss = reason
        if self._engine is not None:
            self._engine.lose(reason)

    def pass_to(self, engine: AttachedEngine) -> None:
        self._engine = engine
        if self._state is not None:
            engine.adopt(self._state)
        if self._loss:
            engine.lose(self._loss)


__all__ = ["AttachedEngine", "attach"]
