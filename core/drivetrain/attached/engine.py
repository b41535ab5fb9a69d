"""The page of an engine that another process owns."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    states: list[SharedState] = []
    on_state: list[Callable[[SharedState], None]] = [states.append]
    on_lost: list[Callable[[str], None]] = []
    lost: list[str] = []

    def take_lost(reason: str) -> None:
        lost.append(reason)
        for tell in on_lost:
            tell(reason)

    connection, facts, pulse = await connect(handle, lambda state: on_state[0](state), take_lost, patience)
    backend = AttachedBackend(handle, connection, facts, pulse)
    engine = AttachedEngine(facts, backend)
    await engine.start()
    on_state[0] = engine.adopt
    engine.adopt(states[-1])
    on_lost.append(backend.lost)
    if lost:
        backend.lost(lost[0])
    return engine


__all__ = ["AttachedEngine", "attach"]
