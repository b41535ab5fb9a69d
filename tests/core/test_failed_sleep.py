"""Sleeps and wake-ups that fail: in an unknown way, which fails the engine, or because time is over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from drivetrain import Capability, EngineConfig, EngineState, EngineStateError, InferenceEngine, Isolation, MemoryTag
from drivetrain.errors import DeadlineExceeded, DrivetrainError, EngineBusy, EngineInternalError, EngineOutOfMemory
from drivetrain.testing import tiny_model
from scripted_backend import ScriptedBackend

pytestmark = pytest.mark.asyncio


class Sleeper(ScriptedBackend):
    error: DrivetrainError | None = None
    asked = 0
    """Number of calls of ``sleep`` and ``wake_up``."""

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        self.asked += 1
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


def fails(engine: InferenceEngine, error: DrivetrainError | None) -> None:
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


async def test_a_sleep_that_timed_out_is_asked_for_again(engine: InferenceEngine) -> None:
    backend = engine.parts.backend
    assert isinstance(backend, Sleeper)
    fails(engine, DeadlineExceeded("timed out after 0 s waiting for the engine to fall asleep"))
    for asked in (1, 2):
        with pytest.raises(DeadlineExceeded):
            await engine.sleep(["kv_cache"])
        assert (engine.state.value, backend.asked) == ("asleep", asked)
    fails(engine, None)
    await engine.sleep(["kv_cache"])
    assert (engine.state.value, backend.asked) == ("asleep", 3)
    await engine.sleep(["kv_cache"])
    assert backend.asked == 3


async def test_a_sleep_after_a_wake_up_that_timed_out_is_asked_for(engine: InferenceEngine) -> None:
    backend = engine.parts.backend
    assert isinstance(backend, Sleeper)
    await engine.sleep(["kv_cache"])
    fails(engine, DeadlineExceeded("timed out after 0 s waiting for the engine to wake up"))
    with pytest.raises(DeadlineExceeded):
        await engine.wake_up()
    assert engine.state.value == "asleep"
    fails(engine, None)
    await engine.sleep(["kv_cache"])
    assert backend.asked == 3
    await engine.wake_up()
    await engine.sleep(["kv_cache"])
    await engine.sleep(["kv_cache"])
    assert backend.asked == 5


async def test_an_engine_that_finds_no_memory_stays_as_it_is_and_is_asked_again(engine: InferenceEngine) -> None:
    backend = engine.parts.backend
    assert isinstance(backend, Sleeper)
    fails(engine, EngineOutOfMemory("sleep() ran out of memory"))
    with pytest.raises(EngineOutOfMemory):
        await engine.sleep(["kv_cache"])
    assert engine.state.value == "ready"
    fails(engine, None)
    await engine.sleep(["kv_cache"])
    fails(engine, EngineOutOfMemory("wake_up() ran out of memory"))
    with pytest.raises(EngineOutOfMemory):
        await engine.wake_up()
    assert engine.state.value == "asleep"
    fails(engine, None)
    await engine.sleep(["kv_cache"])
    await engine.wake_up()
    assert (engine.state.value, backend.asked) == ("ready", 5)
