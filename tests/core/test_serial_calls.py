"""Calls that run to their end, one after another, whoever stops waiting for them."""

from __future__ import annotations

import asyncio

import pytest

from drivetrain.backend.toolkit.serial_calls import SerialCalls


async def test_a_cancelled_call_ends_before_the_next_begins() -> None:
    calls, begun, may_end, said = SerialCalls(), asyncio.Event(), asyncio.Event(), list[str]()

    async def first() -> None:
        begun.set()
        await may_end.wait()
        said.append("first")

    async def second() -> str:
        said.append("second")
        return "its answer"

    given_up = asyncio.ensure_future(calls.run(first))
    await begun.wait()
    given_up.cancel()
    await asyncio.wait([given_up])
    assert given_up.cancelled()
    waiting = asyncio.ensure_future(calls.run(second))
    await asyncio.sleep(0)
    assert said == []
    may_end.set()
    assert await waiting == "its answer"
    assert said == ["first", "second"]


async def test_a_call_that_had_not_begun_is_not_made() -> None:
    calls, may_end, made = SerialCalls(), asyncio.Event(), list[str]()

    async def late() -> None:
        made.append("late")

    running = asyncio.ensure_future(calls.run(may_end.wait))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(calls.run(late))
    await asyncio.sleep(0)
    waiting.cancel()
    may_end.set()
    await asyncio.wait([running, waiting])
    assert made == []
    await calls.run(late)
    assert made == ["late"]


async def test_a_call_that_fails_frees_the_way() -> None:
    calls = SerialCalls()

    async def fails() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await calls.run(fails)
