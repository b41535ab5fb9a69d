"""What the parts of an attached engine use in the place of a backend: the owner's engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from typing import cast

from drivetrain.attached.connection import OwnerConnection
from drivetrain.backend.base import (
    Backend,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReadMedium,
    TokenDelta,
)
from drivetrain.engine.shared_state import EngineFacts
from drivetrain.errors import DrivetrainError, EngineDied, EngineError, EngineStateError
from drivetrain.process.pulse import Pulse
from drivetrain.process.rpc_methods import SHARED_METHODS
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain.types.prompts import MediaInput


class AttachedBackend(Backend):
    """Passes samples to an engine that another process owns.

    Its parts do the rest of the page: they validate, tokenise and look for stops in this process, and ask the owner for
    all that changes the engine.
    """

    name = "attached"
    engine_distribution = "drivetrain"

    def __init__(self, handle: EngineHandle, connection: OwnerConnection, facts: EngineFacts, pulse: Pulse) -> None:
        super().__init__(facts.config)
        vars(self)["name"] = facts.config.backend
        vars(self)["native_stops"] = facts.native_stops
        self.handle = handle
        self.facts = facts
        self._connection = connection
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._died: asyncio.Future[EngineError] = self._loop.create_future()

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        raise NotImplementedError("an attached engine's capabilities are its owner's")

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return self.facts.model

    async def close(self) -> None:
        """Detach; the engine goes on without this holder."""
        self._connection.fail(functools.partial(EngineStateError, "this engine was detached", state="closed"))
        self._connection.close()
        await asyncio.to_thread(self._pulse.stop)

    @property
    def pid(self) -> int | None:
        return self.facts.pid

    async def died(self) -> EngineError:
        return await asyncio.shield(self._died)

    def lost(self, reason: str) -> None:
        """Fail every waiting call: the owner is gone."""
        if self._died.done():
            return
        error = functools.partial(EngineDied, f"the owner of the engine at {self.handle.address} {reason}")
        self._died.set_result(error())
        self._connection.fail(cast(Callable[[], DrivetrainError], error))
        self._connection.abort()

    # Calls -----------------------------------------------------------------------------------------------------------

    async def call(self, name: str, *arguments: object) -> object:
        """Call a method of :class:`~drivetrain.process.shared_engine.SharedEngine`."""
        return await self._connection.call(SHARED_METHODS[name], arguments)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return cast(GenerateResult, await self.call("generate", request))

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        return cast(AsyncGenerator[TokenDelta, None], self._connection.stream(SHARED_METHODS["stream"], (request,)))

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


__all__ = ["AttachedBackend"]
