"""Simulated engines of benchmarks: their backend, without the way in which it makes tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drivetrain import Capability, InferenceEngine, Isolation
from drivetrain.backend.base import Backend, EngineStats, ModelInfo
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode


class SimulatedBackend(Backend):
    """A subclass makes the tokens, says what it claims, and may count what is running.

    Args:
        config: The engine's configuration.
        seconds: Time for a token.
    """

    name = "simulated"
    engine_distribution = "drivetrain"
    claimed: frozenset[Capability]
    context_length = 200_000

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        super().__init__(config)
        self.seconds = seconds
        self.running = 0

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return cls.claimed

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return ModelInfo(260, self.context_length, (), "float32", "Simulated", 0, "cpu")

    async def close(self) -> None:
        return None

    async def stats(self) -> EngineStats:
        return EngineStats(self.running, 0, 0, 0)

    async def abort(self, request_ids: list[str]) -> None:
        return None

    async def freeze(self, mode: PauseMode) -> None:
        return None

    async def unfreeze(self) -> None:
        return None


def simulated_engine(kind: type[SimulatedBackend], model: Path, seconds: float) -> InferenceEngine:
    """Make an engine, not started. ``model`` is a folder with a tokenizer."""
    config = EngineConfig(backend="simulated", model=str(model))
    return InferenceEngine(
        config, kind(config, seconds), capabilities=kind.claimed, isolation=Isolation.INLINE, versions={}
    )
