"""Deadlines: a result that is ready when the deadline is checked wins, even if the event loop was blocked."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DeadlineExceeded


async def later(seconds: float) -> int:
    """Return a result that another thread delivers after ``seconds``, whatever the event loop does."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[int] = loop.create_future()
    threading.Timer(seconds, lambda: loop.call_soon_threadsafe(result.set_result, 5)).start()
    return await result


async def test_a_wait_that_is_too_long_ends() -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"timed out after 0\.1 s waiting for a result"):
        async with deadline(0.1, "a result"):
            await asyncio.sleep(600)
    assert time.monotonic() - began < 60


async def test_no_deadline_at_all() -> None:
    async with deadline(None, "a result"):
        await asyncio.sleep(0.01)


async def test_a_result_that_came_while_the_event_loop_was_blocked_wins() -> None:
    waiting = asyncio.create_task(later(0.1))

    async def bounded() -> int:
        async with deadline(0.2, "a result"):
            return await waiting

    task = asyncio.create_task(bounded())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - as a training step does
    assert await task == 5


async def test_a_blocked_event_loop_postpones_a_deadline_by_a_second_at_most() -> None:
    async def bounded() -> None:
        async with deadline(0.05, "a result"):
            await asyncio.sleep(600)

    task = asyncio.create_task(bounded())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await task
    assert 0.2 < time.monotonic() - began < 60


async def test_somebody_elses_timeout_stays_one() -> None:
    with pytest.raises(TimeoutError, match="theirs"):
        async with deadline(5, "a result"):
            raise TimeoutError("theirs")
