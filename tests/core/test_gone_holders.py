"""Holders that are gone while another change of state takes longer than the time to undo their calls."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from drivetrain import Capability, EngineConfig, InferenceEngine, Isolation, MemoryTag, PauseMode
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DeadlineExceeded
from drivetrain.testing import tiny_model
from scripted_backend import ScriptedBackend

pytestmark = pytest.mark.asyncio

CACHE = [MemoryTag.KV_CACHE]


class Sleeper(ScriptedBackend):
    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        pass


@pytest.fixture
async def engine() -> AsyncIterator[InferenceEngine]:
    config = EngineConfig(backend="sleeper", model=str(tiny_model("qwen2")))
    claims = frozenset({Capability.SLEEP_KV_CACHE, Capability.PAUSE_WAIT})
    async with InferenceEngine(
        config, Sleeper(config), capabilities=claims, isolation=Isolation.INLINE, versions={}
    ) as engine:
        yield engine


async def test_a_pause_is_not_kept_by_a_holder_that_was_dropped_in_vain(engine: InferenceEngine) -> None:
    pauses, first, second = engine.parts.pauses, object(), object()
    await pauses.pause(PauseMode.WAIT, None, by=first)
    async with engine.parts.controller.controlling("a long change"):
        with pytest.raises(DeadlineExceeded):
            async with deadline(0.01, "the other change"):
                await pauses.drop_pause_of(first)
    await pauses.pause(PauseMode.WAIT, None, by=second)
    await pauses.drop_pause_of(second)
    assert not engine.is_paused


async def test_a_holder_that_was_dropped_in_vain_does_not_hide_the_next(engine: InferenceEngine) -> None:
    pauses, first, second = engine.parts.pauses, object(), object()
    await pauses.sleep(CACHE, None, False, 1.0, by=first)
    async with engine.parts.controller.controlling("a long change"):
        with pytest.raises(DeadlineExceeded):
            async with deadline(0.01, "the other change"):
                await pauses.drop_sleep_of(first, "the first holder")
    await pauses.sleep(CACHE, None, False, 1.0, by=second)
    await pauses.drop_sleep_of(second, "the second holder")
    assert engine.describe().state == "asleep (kv_cache), left so by the second holder, which is gone"
