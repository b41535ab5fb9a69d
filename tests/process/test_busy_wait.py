"""Waiting without sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drivetrain.process import busy_wait as module
from drivetrain.process.busy_wait import busy_wait


def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return the timeouts that the event loop passes to its selector."""
    selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select, found = selector.select, []

    def noted(timeout: float | None = None) -> object:
        found.append(timeout)
        return select(timeout)

    monkeypatch.setattr(selector, "select", noted)
    return found


async def test_the_loop_does_not_sleep_within(monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(monkeypatch)
    async with busy_wait():
        await asyncio.sleep(0.02)
    assert set(found) == {0}
    found.clear()
    await asyncio.sleep(0.02)
    assert max(timeout or 0 for timeout in found) > 0


async def test_it_sleeps_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_S", 0.01)
    found = waits(monkeypatch)
    async with busy_wait():
        await asyncio.sleep(0.1)
    assert max(timeout or 0 for timeout in found) > 0


async def test_it_ends_with_what_is_raised_within() -> None:
    with pytest.raises(ValueError, match="within"):
        async with busy_wait():
            raise ValueError("within")
    await asyncio.sleep(0.001)
    assert asyncio.all_tasks() == {asyncio.current_task()}
