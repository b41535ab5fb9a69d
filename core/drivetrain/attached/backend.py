"""The stand-in for a backend under an attached engine: calls of the owner's engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import cast

from drivetrain.attached.owner import Owner
from drivetrain.backend.base import (
    Backend,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReadMedium,
    TokenDelta,
)
from drivetrain.engine.shared_state import EngineFacts, SharedState
from drivetrain.errors import EngineError
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain.types.prompts import MediaInput


class AttachedBackend(Backend):
    """Passes samples to an engine that another process owns.

    The engine's other parts validate, tokenise and look for stops in this process. They ask the owner for every change
    of the engine.
    """

    name = "attached"
    engine_distribution = "drivetrain"

    def __init__(self, handle: EngineHandle, facts: EngineFacts, patience: float) -> None:
        super().__init__(facts.config)
        self.name = facts.config.backend
        self.native_stops = facts.native_stops
        self.counts_resumed_tokens = facts.counts_resumed_tokens
        self.facts = facts
        self.state: SharedState | None = None
        """The engine's newest state."""
        self.on_state: Callable[[SharedState], None] | None = None
        """Called with each later state; set once the engine has started."""
        self.owner = Owner(handle, facts, self._take_state)
        self._patience = patience

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        raise NotImplementedError("an attached engine's capabilities are its owner's")

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        report("connecting")
        await self.owner.start(self._patience)
        return self.facts.model

    def _take_state(self, state: SharedState) -> None:
        self.state = state
        if self.on_state is not None:
            self.on_state(state)

    async def close(self) -> None:
        """Detach; the engine goes on without this holder."""
        await self.owner.close()

    @property
    def pid(self) -> int | None:
        return self.facts.pid

    async def died(self) -> EngineError:
        return await self.owner.died()

    # Calls -----------------------------------------------------------------------------------------------------------

    async def call(self, name: str, *arguments: object) -> object:
        """Call a method of :class:`~drivetrain.process.shared_engine.SharedEngine`."""
        return await self.owner.call(name, *arguments)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return cast(GenerateResult, await self.call("generate", request))

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        return cast(AsyncGenerator[TokenDelta, None], self.owner.stream("stream", request))

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        return cast(list[ReadMedium], await self.call("read_media", media))

    async def abort(self, request_ids: list[str]) -> None:
        await self.call("abort_samples", request_ids)

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return cast(list[list[float]], await self.call("embed", prompts, dimensions))

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        return cast(list[float], await self.call("reward_score", sequences))

    async def stats(self) -> EngineStats:
        return cast(EngineStats, await self.call("stats"))

    async def start_profile(self, directory: str) -> None:
        await self.call("start_profile", directory)

    async def stop_profile(self) -> str:
        return cast(str, await self.call("stop_profile"))
