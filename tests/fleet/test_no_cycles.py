"""Requests leave no reference cycles, which would keep them until a full pass of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from drivetrain import InferenceEngine, SamplingParams
from fleets import fleet_of, local

REQUESTS = 8
SHORT = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=900, temperature=0, ignore_eos=True)

Request = Callable[[InferenceEngine, int], Coroutine[object, object, None]]


async def ends(engine: InferenceEngine, index: int) -> None:
    await engine.generate([5, 6, index], SHORT)


async def is_cancelled(engine: InferenceEngine, index: int) -> None:
    asking = asyncio.ensure_future(engine.generate([5, 6, index], LONG))
    while not engine.parts.in_flight.running:  # noqa: ASYNC110 - a helper would leave objects of its own
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])


async def leaves_its_stream(engine: InferenceEngine, index: int) -> None:
    stream = engine.generate_stream([5, 6, index], LONG)
    await anext(stream)
    await stream.aclose()


async def is_aborted(engine: InferenceEngine, index: int) -> None:
    asking = asyncio.ensure_future(engine.generate([5, 6, index], LONG, request_ids=[f"request-{index}"]))
    while not engine.parts.in_flight.running:  # noqa: ASYNC110 - a helper would leave objects of its own
        await asyncio.sleep(0)
    await engine.abort(f"request-{index}")
    await asking


@pytest.mark.parametrize("request_that", [ends, is_cancelled, leaves_its_stream, is_aborted])
@pytest.mark.parametrize("engines", [0, 2], ids=["engine", "fleet"])
async def test_a_request_leaves_no_garbage(model: Path, engines: int, request_that: Request) -> None:
    async with fleet_of(engines, model) if engines else local(model) as engine:
        await request_that(engine, 0)  # makes what is made once
        await asyncio.sleep(0)
        gc.collect()
        gc.disable()
        try:
            for index in range(REQUESTS):
                await request_that(engine, index)
            await asyncio.sleep(0)
            found = gc.collect()
        finally:
            gc.enable()
    assert found < REQUESTS, f"{found} objects of {REQUESTS} requests were reachable from each other alone"
