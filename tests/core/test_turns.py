"""The work of a large call within one turn of the event loop is bounded, counted in samples."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from drivetrain import (
    Capability,
    EngineConfig,
    FinishReason,
    GenerationOutput,
    InferenceEngine,
    Isolation,
    PauseMode,
    VersionSpan,
)
from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.checks.limits import MOST_SAMPLES, SAMPLES_AT_ONCE, SAMPLES_UNDER_WAY
from drivetrain.engine.controller import Controller
from drivetrain.engine.parts import PartKinds
from drivetrain.testing import tiny_model

AT_ONCE = 2 * SAMPLES_AT_ONCE
"""Twice the limit: some samples may be released in the same turn in which others are created."""


class Counting(Backend):
    """An engine that counts the arrivals and ends of requests in each turn of the event loop."""

    name = "counting"
    engine_distribution = "pluggy"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.turn = 0
        self.begun: Counter[int] = Counter()
        self.cancelled: Counter[int] = Counter()
        self.holds = False

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset({Capability.STREAMING, Capability.ABORT, Capability.PAUSE_ABORT})

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return ModelInfo(300, 100, (), "float32", "Counting", 0, "cpu")

    async def close(self) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)

    async def abort(self, request_ids: list[str]) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.begun[self.turn] += 1
        try:
            await asyncio.sleep(10_000 if self.holds else 0)
        except asyncio.CancelledError:
            self.cancelled[self.turn] += 1
            raise
        return GenerateResult([5], FinishReason.LENGTH, [VersionSpan("0", 0, 1)])

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        result = await self.generate(request)
        yield TokenDelta([5], None, None, result)


class CountingLooks(Controller):
    """Counts how often samples look whether the gate is open."""

    looks = 0

    def holds_requests(self) -> bool:
        self.looks += 1
        return super().holds_requests()


@asynccontextmanager
async def opened(kinds: PartKinds | None = None) -> AsyncIterator[tuple[InferenceEngine, Counting]]:
    config = EngineConfig(backend=Counting.name, model=str(tiny_model("qwen2")))
    backend = Counting(config)
    capabilities = Counting.capabilities(config)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            backend.turn += 1

    engine = InferenceEngine(config, backend, capabilities=capabilities, isolation=Isolation.INLINE, versions={})
    if kinds is not None:
        engine.parts = kinds.build(config, backend, capabilities)
    async with engine:
        counting = asyncio.create_task(count_turns())
        yield engine, backend
        counting.cancel()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the loop counts turns
        await asyncio.sleep(0)


def call(engine: InferenceEngine, n: int) -> asyncio.Task[GenerationOutput]:
    return asyncio.create_task(engine.generate([1, 2], {"n": n, "max_new_tokens": 1}))


async def test_few_samples_begin_at_each_turn() -> None:
    async with opened() as (engine, backend):
        assert len((await call(engine, MOST_SAMPLES)).completions) == MOST_SAMPLES
        assert max(backend.begun.values()) <= AT_ONCE


async def test_few_streams_begin_at_each_turn() -> None:
    async with opened() as (engine, backend):
        stream = engine.generate_stream([1, 2], {"n": SAMPLES_UNDER_WAY, "max_new_tokens": 1})
        assert len([chunk async for chunk in stream]) == SAMPLES_UNDER_WAY
        assert max(backend.begun.values()) <= AT_ONCE


async def test_few_samples_leave_the_gate_at_each_turn() -> None:
    async with opened() as (engine, backend):
        await engine.pause_generation(PauseMode.ABORT)
        waiting = call(engine, SAMPLES_UNDER_WAY)
        await until(lambda: engine.parts.in_flight.waiting == SAMPLES_UNDER_WAY)
        await engine.continue_generation()
        assert len((await waiting).completions) == SAMPLES_UNDER_WAY
        assert max(backend.begun.values()) <= AT_ONCE


async def test_samples_at_the_gate_sleep_on_when_others_end() -> None:
    """A sample that ends must not wake all waiting samples: with thousands of them, that takes seconds."""
    async with opened(PartKinds(controller=CountingLooks)) as (engine, backend):
        controller, in_flight = engine.parts.controller, engine.parts.in_flight
        assert isinstance(controller, CountingLooks)
        backend.holds = True
        running = call(engine, 1)
        await until(lambda: in_flight.running == 1)
        with controller.shut_gate():
            waiting = call(engine, 2)
            await until(lambda: in_flight.waiting == 2)
            before = controller.looks
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            for _ in range(3):
                await asyncio.sleep(0)
            assert (in_flight.waiting, controller.looks) == (2, before)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert in_flight.waiting == 0


async def test_few_samples_are_cancelled_at_each_turn() -> None:
    async with opened() as (engine, backend):
        backend.holds = True
        running = call(engine, SAMPLES_UNDER_WAY)
        await until(lambda: engine.parts.in_flight.running == SAMPLES_UNDER_WAY)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert backend.cancelled.total() == SAMPLES_UNDER_WAY
        assert max(backend.cancelled.values()) <= AT_ONCE


async def test_all_samples_are_cancelled_though_cancelling_is_cancelled() -> None:
    async with opened() as (engine, backend):
        backend.holds = True
        running = call(engine, SAMPLES_UNDER_WAY)
        await until(lambda: engine.parts.in_flight.running == SAMPLES_UNDER_WAY)
        running.cancel()
        await until(lambda: backend.cancelled.total() > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: backend.cancelled.total() == SAMPLES_UNDER_WAY)
