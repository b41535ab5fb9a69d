"""Types shared by the engine tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from drivetrain import InferenceEngine

OpenEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Opens a throwaway engine on the tiny model; keyword arguments are fields of its configuration."""


async def until_running(engine: InferenceEngine, count: int, within: float = 20.0) -> None:
    """Return when ``count`` samples or more run in the engine; fail after ``within`` seconds."""
    await _until(engine, lambda running: running >= count, f"at least {count}", within)


async def until_idle(engine: InferenceEngine, within: float) -> None:
    """Return when no sample runs in the engine; fail after ``within`` seconds."""
    await _until(engine, lambda running: running == 0, "none", within)


async def _until(engine: InferenceEngine, holds: Callable[[int], bool], wanted: str, within: float) -> None:
    now = asyncio.get_running_loop().time
    deadline = now() + within
    while not holds(running := (await engine.stats()).running):
        assert now() < deadline, f"{running} samples run after {within} s; expected {wanted}"
        await asyncio.sleep(0.005)
