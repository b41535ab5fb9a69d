"""Time limits of cases: what ends in time passes, what does not hangs, and seconds on a busy machine count less."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from drivetrain_conformance.harness.time_limits import Countdown, Hangs, result_of, until_ended, within


async def test_a_block_that_takes_too_long_hangs_by_name() -> None:
    with pytest.raises(Hangs, match="hangs: an answer did not end within"):
        async with within("an answer", seconds=0.05):
            await asyncio.get_running_loop().create_future()


async def test_a_timeout_within_a_block_is_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with within():
            raise TimeoutError


async def test_a_task_that_takes_too_long_goes_on() -> None:
    task = asyncio.create_task(asyncio.sleep(600))
    assert not await until_ended(task, seconds=0.05)
    with pytest.raises(Hangs):
        await result_of(task, seconds=0.05)
    assert not task.done()
    task.cancel()
    assert await until_ended(task)


async def test_a_result_and_an_error_come_through() -> None:
    async def fail() -> None:
        raise ValueError("of the task")

    assert await result_of(asyncio.create_task(asyncio.sleep(0, "result"))) == "result"
    with pytest.raises(ValueError, match="of the task"):
        await result_of(asyncio.create_task(fail()))


async def test_seconds_on_a_busy_machine_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    countdown = Countdown(0.3)
    async with within(seconds=0.3):
        await asyncio.sleep(0.6)
    assert await until_ended(asyncio.create_task(asyncio.sleep(0.6)), seconds=0.3)
    assert countdown.left() > 0
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    time.sleep(0.3)  # noqa: ASYNC251 - only the clock has to go on
    assert countdown.left() == 0
