"""The page of an engine that another process owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from drivetrain.attached.backend import AttachedBackend
from drivetrain.attached.connection import fetch_facts
from drivetrain.attached.parts import (
    AttachedAdapters,
    AttachedCommunicators,
    AttachedController,
    AttachedGeneration,
    AttachedLoadedAdapters,
    AttachedModel,
    AttachedPauses,
    AttachedPooling,
    AttachedRequests,
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
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.handle import EngineHandle

PATIENCE_S: Final = 30.0
"""Seconds to connect within, if not given."""
_KINDS: Final = PartKinds(
    controller=AttachedController,
    model=AttachedModel,
    loaded_adapters=AttachedLoadedAdapters,
    in_flight=AttachedRequests,
    pauses=AttachedPauses,
    weights=AttachedWeights,
    updates=AttachedUpdates,
    communicators=AttachedCommunicators,
    adapters=AttachedAdapters,
    generation=AttachedGeneration,
    pooling=AttachedPooling,
)


class AttachedEngine(InferenceEngine):
    """An engine that another process owns. Made by :func:`attach`, or by ``create_engine("remote")``.

    Prompts are tokenised and texts cut in this process; states, gates and versions are the owner's. ``teardown``
    detaches: the engine goes on. Sessions are this holder's own.

    Args:
        facts: The engine, as its owner described it.
        backend: Calls the owner.
        config: The engine's configuration with this process's deadlines; None: the owner's.
    """

    def __init__(self, facts: EngineFacts, backend: AttachedBackend, config: EngineConfig | None = None) -> None:
        config = config or facts.config
        capabilities = frozenset(one for one in Capability if one.value in facts.capabilities)
        if facts.machine != this_machine():
            capabilities -= {Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_CUDA_IPC}
        super().__init__(
            config,
            backend,
            capabilities=capabilities,
            isolation=Isolation.PROCESS,
            versions=dict(facts.versions),
        )
        self.parts = _KINDS.build(config, backend, capabilities)

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Connect to the engine's owner.

        Raises:
            EngineStateError: The engine was closed, or its owner has ended.
            EngineDied: The engine died; or another engine listens at the handle's address by now.
            WireError: The key is wrong, or the owner has another version of drivetrain.
            TlsError: Its certificate is refused, or only one of the two sides speaks TLS.
            DeadlineExceeded: The owner does not answer in time.
        """
        await super().start(progress)
        backend = self._backend
        backend.on_state = self._adopt
        assert backend.state is not None
        self._adopt(backend.state)

    def _adopt(self, state: SharedState) -> None:
        """Take the state that the owner reported."""
        parts = self.parts
        assert isinstance(parts.controller, AttachedController)
        assert isinstance(parts.loaded_adapters, AttachedLoadedAdapters)
        parts.loaded_adapters.adopt(state.adapters)
        parts.weights.publish(state.version, state.update_id)
        parts.controller.adopt(state.status)

    @property
    def _backend(self) -> AttachedBackend:
        assert isinstance(self.parts.backend, AttachedBackend)
        return self.parts.backend

    async def handle(
        self,
        listen: str | None = None,
        *,
        key: str | None = None,
        announce: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
    ) -> EngineHandle:
        """Return the handle that this engine was attached by; its owner makes new ones."""
        if any(given is not None for given in (listen, key, announce, ssl_certfile, ssl_keyfile)):
            raise EngineStateError(
                "only the owner of an engine listens for holders; this process is attached to it",
                state=self.state.value,
            )
        return self._backend.owner.handle


async def attach(handle: EngineHandle, *, timeout: float | None = None) -> AttachedEngine:
    """Attach to an engine that another process owns; return its page, ready for use.

    Args:
        handle: The value that the owner's ``engine.handle()`` returned.
        timeout: Seconds to connect within; 30 if not given.

    Raises:
        InvalidRequest: It is no handle.
        EngineDied: The engine died.
        EngineStateError: The engine was closed, or its owner has ended.
        WireError: The key is wrong, or the owner has another version of drivetrain.
        TlsError: Its certificate is refused, or only one of the two sides speaks TLS.
        DeadlineExceeded: The owner does not answer in time.
    """
    if not isinstance(handle, EngineHandle):
        raise InvalidRequest(f"handle={shown(handle)}: expected what engine.handle() returns", field="handle")
    patience = check_seconds(timeout, PATIENCE_S)
    facts = await asyncio.to_thread(fetch_facts, handle, patience)
    engine = AttachedEngine(facts, AttachedBackend(handle, facts, patience))
    await engine.start()
    return engine
