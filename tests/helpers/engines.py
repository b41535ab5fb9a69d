"""Types shared by the engine tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from drivetrain import InferenceEngine

OpenEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Opens a throwaway engine on the tiny model; keyword arguments are fields of its configuration."""


async def until_running(engine: InferenceEngine, count: int) -> None:
    """Return when ``count`` samples or more run in the engine; fail after 20 seconds."""
    await _until(engine, lambda running: running >= count, f"at least {count}")


async def until_idle(engine: InferenceEngine) -> None:
    """Return when no sample runs in the engine; fail after 20 seconds."""
    await _until(engine, lambda running: running == 0, "none")


async def _until(engine: InferenceEngine, holds: Callable[[int], bool], wanted: str) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not holds(running := (await engine.stats()).running):
        assert asyncio.get_running_loop().time() < deadline, f"{running} samples run; expected {wanted}"
        await asyncio.sleep(0.005)
