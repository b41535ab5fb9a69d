"""A real engine of BACKEND takes no step while memory sleeps, whatever requests it has; ``make test-asleep``.

The page sends a backend no request then. One whose caller has left may still be on its way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator

import pytest

from drivetrain import InferenceEngine, create_engine
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.testing import tiny_model
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.sampling import JsonSchema, LogprobsMode, SamplingParams

PROMPT, TOKENS = list(range(5, 25)), 12
KV_CACHE, BOTH = frozenset({MemoryTag.KV_CACHE}), frozenset({MemoryTag.KV_CACHE, MemoryTag.WEIGHTS})


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(loop: asyncio.AbstractEventLoop) -> Iterator[InferenceEngine]:
    engine = create_engine(os.environ.get("BACKEND", "sglang"), model=str(tiny_model()), dtype="float32")
    loop.run_until_complete(engine.start())
    yield engine
    loop.run_until_complete(engine.teardown())


def asked(name: str, **fields: object) -> GenerateRequest:
    params = SamplingParams.model_validate({"temperature": 0.0, **fields})
    return GenerateRequest(name, PROMPT, params, TOKENS, (), LogprobsMode.RAW)


async def arrived(engine: InferenceEngine, task: asyncio.Task[GenerateResult]) -> None:
    """Wait until the request is in the engine's process."""
    backend = engine.parts.backend
    while not (await backend.stats()).waiting:
        assert not task.done(), task
        await asyncio.sleep(0.01)


async def many_turns(engine: InferenceEngine) -> None:
    """Let the engine's loop come round many times."""
    for _ in range(50):
        assert (await engine.parts.backend.stats()).waiting == 1


async def late(engine: InferenceEngine) -> GenerateResult:
    """A request arrives while memory sleeps."""
    backend = engine.parts.backend
    await backend.sleep(KV_CACHE)
    task = asyncio.create_task(backend.generate(asked("late")))
    await arrived(engine, task)
    await many_turns(engine)
    await backend.wake_up(KV_CACHE)
    return await task


async def together(engine: InferenceEngine) -> GenerateResult:
    """A request waits when the sleep comes, and the engine is not frozen afterwards."""
    backend = engine.parts.backend
    await backend.freeze(PauseMode.RETRACT)
    task = asyncio.create_task(backend.generate(asked("together")))
    await arrived(engine, task)
    await backend.sleep(KV_CACHE)
    await backend.unfreeze()
    await many_turns(engine)
    await backend.wake_up(KV_CACHE)
    return await task


async def frozen(engine: InferenceEngine) -> GenerateResult:
    """A freeze while memory sleeps outlasts the sleep."""
    backend = engine.parts.backend
    await backend.sleep(KV_CACHE)
    await backend.freeze(PauseMode.IN_PLACE)
    task = asyncio.create_task(backend.generate(asked("frozen")))
    await arrived(engine, task)
    await backend.wake_up(KV_CACHE)
    await many_turns(engine)
    await backend.unfreeze()
    return await task


@pytest.mark.parametrize("course", [late, together, frozen], ids=lambda course: course.__name__)
def test_a_request_waits_until_all_memory_is_awake(
    loop: asyncio.AbstractEventLoop,
    engine: InferenceEngine,
    course: Callable[[InferenceEngine], Awaitable[GenerateResult]],
) -> None:
    async def run() -> None:
        whole = await engine.parts.backend.generate(asked("whole"))
        assert len(whole.token_ids) == TOKENS
        assert (await asyncio.wait_for(course(engine), 120)).token_ids == whole.token_ids

    loop.run_until_complete(run())


@pytest.mark.parametrize("grammar", [None, '{"type": "object", "properties": {"late": {"type": "integer"}}}'])
def test_an_abort_ends_a_request_that_came_late(
    loop: asyncio.AbstractEventLoop, engine: InferenceEngine, grammar: str | None
) -> None:
    async def run() -> None:
        backend = engine.parts.backend
        structured_output = None if grammar is None else JsonSchema(json_schema=grammar)
        await backend.sleep(KV_CACHE)
        task = asyncio.create_task(backend.generate(asked("aborted", structured_output=structured_output)))
        await arrived(engine, task)
        await backend.abort(["aborted"])
        assert not (await asyncio.wait_for(task, 60)).token_ids
        stats = await backend.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        await backend.sleep(BOTH - KV_CACHE)
        await backend.wake_up(BOTH)

    loop.run_until_complete(run())
