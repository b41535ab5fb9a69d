"""An engine that stops making steps is detected, and its callers get an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from drivetrain import (
    Capability,
    EngineConfig,
    EngineDied,
    EngineState,
    InferenceEngine,
    Isolation,
    Timeouts,
)
from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.errors import EngineError, EngineInternalError
from drivetrain.testing import tiny_model


class Still(Backend):
    """An engine whose requests never end."""

    name = "still"
    engine_distribution = "pluggy"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.asked = 0
        self.dying = asyncio.Event()

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset({Capability.STREAMING})

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return ModelInfo(300, 100, (), "float32", "Still", 0, "cpu")

    async def close(self) -> None:
        pass

    async def stats(self) -> EngineStats:
        self.asked += 1
        await asyncio.sleep(10_000)
        return EngineStats(1, 0, 0, 0)

    async def died(self) -> EngineError:
        await self.dying.wait()
        return EngineDied("it says so itself")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(10_000)
        raise AssertionError

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])
        await asyncio.sleep(10_000)


class Slow(Still):
    """An engine whose requests take long, but which makes steps."""

    async def stats(self) -> EngineStats:
        self.asked += 1
        return EngineStats(1, 0, 0, 0)


class Odd(Still):
    """An engine that answers with errors, which shows that it is not stalled."""

    async def stats(self) -> EngineStats:
        self.asked += 1
        raise EngineInternalError("no numbers")


@asynccontextmanager
async def opened(cls: type[Still], seconds: float) -> AsyncIterator[tuple[InferenceEngine, Still]]:
    timeouts = Timeouts(step=seconds, weight_update=seconds)
    config = EngineConfig(backend=cls.name, model=str(tiny_model("qwen2")), timeouts=timeouts)
    backend = cls(config)
    capabilities = cls.capabilities(config)
    async with InferenceEngine(
        config, backend, capabilities=capabilities, isolation=Isolation.INLINE, versions={}
    ) as engine:
        yield engine, backend


async def read(engine: InferenceEngine) -> None:
    async for _ in engine.generate_stream([1, 2]):
        pass


async def test_requests_of_an_engine_that_stands_still_are_told() -> None:
    async with opened(Still, 0.2) as (engine, _):
        waiting = [asyncio.create_task(call) for call in (engine.generate([1, 2], {"n": 2}), read(engine))]
        for result in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 240):
            assert isinstance(result, EngineDied)
            assert "made no step for 0.2 s, with 3 requests in flight" in str(result)
            assert "timeouts.step" in str(result)
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineDied, match="made no step"):
            await engine.generate([1, 2])


@pytest.mark.parametrize("cls", [Slow, Odd])
async def test_an_engine_that_answers_lives_on(cls: type[Still]) -> None:
    async with opened(cls, 0.2) as (engine, backend):
        waiting = asyncio.create_task(engine.generate([1, 2]))
        while backend.asked < 3:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        assert engine.state is EngineState.READY
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_an_idle_engine_is_not_asked() -> None:
    async with opened(Still, 0.04) as (engine, backend):
        await asyncio.sleep(0.2)
        assert backend.asked == 0
        assert engine.state is EngineState.READY


async def test_requests_of_an_engine_in_this_process_that_says_that_it_died_are_told() -> None:
    async with opened(Still, 10_000) as (engine, backend):
        waiting = asyncio.create_task(engine.generate([1, 2]))
        await asyncio.sleep(0)
        backend.dying.set()
        with pytest.raises(EngineDied, match="it says so itself"):
            await asyncio.wait_for(waiting, 240)
        assert engine.state is EngineState.FAILED
