"""When a caller sees EngineDied the engine is already in state FAILED, whoever noticed its death first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from drivetrain import Capability, EngineConfig, EngineDied, EngineState, InferenceEngine, Isolation
from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.testing import tiny_model


class Dead(Backend):
    """An engine that dies at its first request, which its death watch never notices."""

    name = "dead"
    engine_distribution = "pluggy"

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset({Capability.STREAMING})

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return ModelInfo(300, 100, (), "float32", "Dead", 0, "cpu")

    async def close(self) -> None:
        pass

    async def stats(self) -> EngineStats:
        raise EngineDied("it is gone")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        raise EngineDied("it is gone")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])
        raise EngineDied("it is gone")


@pytest.mark.parametrize("asked", ["generate", "stream", "stats"])
def test_the_engine_is_failed_when_a_caller_sees_that_it_died(asked: str) -> None:
    model: Path = tiny_model("qwen2")
    config = EngineConfig(backend="dead", model=str(model))

    async def ask(engine: InferenceEngine) -> None:
        if asked == "stream":
            _ = [chunk async for chunk in engine.generate_stream([1, 2])]
        elif asked == "generate":
            await engine.generate([1, 2])
        else:
            await engine.stats()

    async def use() -> None:
        engine = InferenceEngine(
            config,
            Dead(config),
            capabilities=Dead.capabilities(config),
            isolation=Isolation.INLINE,
            versions={},
        )
        async with engine:
            try:
                await ask(engine)
            except EngineDied:
                assert engine.state is EngineState.FAILED
            else:
                pytest.fail("a dead engine answered")
            assert "it is gone" in engine.describe().state
            for call in later_calls(engine):
                with pytest.raises(EngineDied, match=r"is failed \(it is gone\)"):
                    await call()
        for call in later_calls(engine):
            with pytest.raises(EngineDied, match=r"is closed; it died before that \(it is gone\)"):
                await call()

    asyncio.run(use())


def later_calls(engine: InferenceEngine) -> Iterable[Callable[[], Awaitable[object]]]:
    """Return calls that an engine in a wrong state would refuse."""
    return (
        lambda: engine.generate([1, 2]),
        lambda: anext(engine.generate_stream([1, 2])),
        engine.stats,
        engine.start,
        engine.pause_generation,
        engine.continue_generation,
        engine.sleep,
        engine.wake_up,
        engine.abort_generation,
        engine.weight_manifest,
        engine.validate_weights,
        engine.handle,
        lambda: engine.load_weights_from_disk("nowhere", "never"),
        lambda: engine.update_weight_version("never"),
        lambda: engine.load_lora_adapter("a", "nowhere"),
    )
