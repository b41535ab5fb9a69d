"""An engine whose sleep or wake-up fails in an unknown way is failed: nobody knows what it holds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from drivetrain import Capability, EngineConfig, EngineState, EngineStateError, InferenceEngine, Isolation, MemoryTag
from drivetrain.errors import EngineBusy, EngineError, EngineInternalError
from drivetrain.testing import tiny_model
from scripted_backend import ScriptedBackend

pytestmark = pytest.mark.asyncio


class Sleeper(ScriptedBackend):
    error: EngineError | None = None

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        if self.error is not None:
            raise self.error

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await self.sleep(tags)


@pytest.fixture
async def engine() -> AsyncIterator[InferenceEngine]:
    config = EngineConfig(backend="sleeper", model=str(tiny_model("qwen2")))
    claims = frozenset({Capability.SLEEP_KV_CACHE})
    async with InferenceEngine(
        config, Sleeper(config), capabilities=claims, isolation=Isolation.INLINE, versions={}
    ) as engine:
        yield engine


def fails(engine: InferenceEngine, error: EngineError | None) -> None:
    assert isinstance(engine.parts.backend, Sleeper)
    engine.parts.backend.error = error


async def test_an_unknown_failure_of_sleep_fails_the_engine(engine: InferenceEngine) -> None:
    fails(engine, EngineInternalError("the ranks differ after sleep"))
    with pytest.raises(EngineInternalError, match="the ranks differ"):
        await engine.sleep(["kv_cache"])
    assert engine.state is EngineState.FAILED
    with pytest.raises(EngineStateError, match="the ranks differ"):
        await engine.sleep(["kv_cache"])


async def test_an_unknown_failure_of_a_wake_up_fails_the_engine(engine: InferenceEngine) -> None:
    await engine.sleep(["kv_cache"])
    fails(engine, EngineInternalError("the ranks differ after wake_up"))
    with pytest.raises(EngineInternalError, match="the ranks differ"):
        await engine.wake_up()
    assert engine.state is EngineState.FAILED


async def test_an_engine_that_is_busy_stays_as_it_is(engine: InferenceEngine) -> None:
    fails(engine, EngineBusy("requests hold cache"))
    with pytest.raises(EngineBusy):
        await engine.sleep(["kv_cache"])
    assert engine.state.value == "ready"
    fails(engine, None)
    await engine.sleep(["kv_cache"])
    assert engine.state.value == "asleep"
