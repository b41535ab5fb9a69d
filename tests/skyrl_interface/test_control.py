"""SkyRL's pause, sleep and caches: what becomes of requests, and of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from drivetrain import EngineBusy, EngineStateError, InferenceEngine, InvalidRequest, UnsupportedCapability
from drivetrain_trainers.skyrl import InferenceEngineOutput, SkyRLInferenceEngine
from engines import HANGING, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 0.0}
SHORT: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def awake(engine: InferenceEngine) -> AsyncIterator[None]:
    """Every test begins and ends with an engine that generates."""
    yield
    await engine.continue_generation()


def begin(skyrl: SkyRLInferenceEngine, params: dict[str, Any]) -> asyncio.Task[InferenceEngineOutput]:
    return asyncio.create_task(skyrl.generate({"prompt_token_ids": [[5, 6, 7]], "sampling_params": params}))


async def running(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, params: dict[str, Any]
) -> asyncio.Task[InferenceEngineOutput]:
    task = begin(skyrl, params)
    await until_running(engine, 1)
    return task


async def result(task: asyncio.Task[InferenceEngineOutput]) -> InferenceEngineOutput:
    async with asyncio.timeout(HANGING):
        return await task


async def settle() -> None:
    """Give a task that could end every chance to do so."""
    for _ in range(20):
        await asyncio.sleep(0.01)


async def test_abort_generation_ends_requests_and_stays_paused(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine
) -> None:
    task = await running(skyrl, engine, LONG)
    await skyrl.abort_generation()
    aborted = await result(task)
    assert aborted["stop_reasons"] == ["abort"]
    assert len(aborted["response_ids"][0]) < 900
    assert engine.is_paused
    waiting = begin(skyrl, SHORT)
    await settle()
    assert not waiting.done(), "a request ran while the engine was paused"
    await skyrl.continue_generation()
    assert (await result(waiting))["stop_reasons"] == ["length"]


async def test_abort_generation_ends_requests_that_wait_with_no_token(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine
) -> None:
    await skyrl.pause_generation()
    waiting = begin(skyrl, SHORT)
    await settle()
    await skyrl.abort_generation()
    ended = await result(waiting)
    assert (ended["response_ids"], ended["stop_reasons"]) == ([[]], ["abort"])
    assert engine.is_paused


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_frozen_requests_go_on_with_the_same_tokens(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, mode: str
) -> None:
    params = {**LONG, "max_tokens": 300}
    expected = await result(begin(skyrl, params))
    task = await running(skyrl, engine, params)
    await skyrl.pause_generation(mode)
    await settle()
    assert not task.done()
    await skyrl.continue_generation()
    assert (await result(task))["response_ids"] == expected["response_ids"]


async def test_an_unknown_mode_is_refused_and_changes_nothing(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine
) -> None:
    with pytest.raises(InvalidRequest, match="frozen"):
        await skyrl.pause_generation("frozen")
    assert not engine.is_paused


# Sleep ---------------------------------------------------------------------------------------------------------------


async def test_sleep_aborts_requests_first(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    task = await running(skyrl, engine, LONG)
    await skyrl.sleep(tags=["kv_cache"])
    assert (await result(task))["stop_reasons"] == ["abort"]
    assert engine.state.value == "asleep"
    await skyrl.wake_up(tags=["kv_cache"])
    assert (await result(begin(skyrl, SHORT)))["stop_reasons"] == ["length"]


async def test_sleep_can_wait_for_requests_to_end(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    task = await running(skyrl, engine, SHORT)
    await skyrl.sleep(["kv_cache"], abort_first=False, drain_timeout=HANGING)
    assert (await result(task))["stop_reasons"] == ["length"]
    await skyrl.wake_up(["kv_cache"])


async def test_sleep_is_refused_while_requests_run_on(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    task = await running(skyrl, engine, LONG)
    with pytest.raises(EngineBusy, match="drain_timeout=0 s"):
        await skyrl.sleep(["kv_cache"], abort_first=False, drain_timeout=0.0)
    assert engine.state.value == "ready"
    await skyrl.abort_generation()
    await result(task)


async def test_sleep_can_keep_requests_by_retracting_them(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    params = {**LONG, "max_tokens": 300}
    expected = await result(begin(skyrl, params))
    task = await running(skyrl, engine, params)
    await skyrl.sleep(["kv_cache"], pause_mode="retract")
    assert not task.done()
    await skyrl.wake_up(["kv_cache"], resume_generation=False)
    assert engine.is_paused, "requests go on though they were not to be resumed"
    await skyrl.wake_up(["kv_cache"])
    assert (await result(task))["response_ids"] == expected["response_ids"]


@pytest.mark.parametrize("everything", [False, True])
async def test_weights_that_slept_must_come_again(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, model: Path, restored: None, everything: bool
) -> None:
    before = await result(begin(skyrl, SHORT))
    if everything:
        await skyrl.sleep_all(timeout=HANGING)
        assert {tag.value for tag in engine.status.asleep} >= {"weights", "kv_cache"}
        await skyrl.wake_up_all(timeout=HANGING)
    else:
        await skyrl.sleep_weights_only(timeout=HANGING, drain_timeout=1.0)
        assert {tag.value for tag in engine.status.asleep} == {"weights"}
        await skyrl.wake_up_weights_only(resume_generation=True)
    with pytest.raises(EngineStateError, match="dirty"):
        await skyrl.generate({"prompt_token_ids": [[5]]})
    await skyrl.load_weights_from_disk(str(model))
    assert (await result(begin(skyrl, SHORT)))["response_ids"] == before["response_ids"]


# Caches --------------------------------------------------------------------------------------------------------------


async def test_resetting_the_cache_discards_every_prefix(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    prompt = list(range(5, 205))

    async def cached() -> int:
        (completion,) = (await engine.generate([prompt], {"max_new_tokens": 2})).completions
        return completion.cached_tokens

    await cached()
    assert await cached() > 0
    await skyrl.reset_prefix_cache()
    assert await cached() == 0


async def test_storage_that_is_not_there_cannot_be_cleared(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine
) -> None:
    assert not engine.supports("hicache_storage")
    with pytest.raises(UnsupportedCapability, match="hicache_storage"):
        await skyrl.clear_hicache_storage()
