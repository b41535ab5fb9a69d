"""Types and waits shared by the engine tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import ParamSpec

import torch

from drivetrain import InferenceEngine, SamplingParams
from drivetrain.attached.backend import AttachedBackend
from drivetrain.attached.owner import Owner
from drivetrain_conformance.harness.testbench import TooLate

_P = ParamSpec("_P")
_ATTEMPTS = 6

OpenEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Opens a throwaway engine on the tiny model; keyword arguments are configuration fields."""


HANGING = 240.0
"""Seconds after which an awaited operation counts as hanging, also on a busy machine."""


async def require_ready_and_idle(engine: InferenceEngine) -> None:
    """Fail if a test left a shared engine in another state, or with requests."""
    stats = await engine.stats()
    assert engine.state.value == "ready", engine.status.describe()
    assert (stats.running, stats.waiting) == (0, 0)


async def until_running(engine: InferenceEngine, count: int, within: float = HANGING) -> None:
    """Wait until at least ``count`` samples run in the engine; fail after ``within`` seconds."""
    await _until(engine, lambda running: running >= count, f"at least {count}", within)


async def until_generating(engine: InferenceEngine, count: int) -> None:
    """Wait until at least ``count`` samples run in the engine and have a token: a later one has made some by then."""
    await until_running(engine, count)
    await engine.generate("tick", SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True))


async def until_idle(engine: InferenceEngine, tokens: int = 160) -> None:
    """Wait until no sample runs in the engine; fail if one still does after ``tokens`` more tokens.

    Generated tokens serve as the clock, so that the test does not depend on the machine's load: a sample that goes on
    would generate many more.
    """
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    made = 0
    while running := (await engine.stats()).running:
        assert made < tokens, f"{running} samples still run after {made} more tokens"
        await engine.generate("tick", params)
        made += params.max_new_tokens or 0


async def _until(engine: InferenceEngine, holds: Callable[[int], bool], wanted: str, within: float) -> None:
    now = asyncio.get_running_loop().time
    deadline = now() + within
    while not holds(running := (await engine.stats()).running):
        assert now() < deadline, f"{running} samples run after {within} s; expected {wanted}"
        await asyncio.sleep(0.005)


def owner_of(engine: InferenceEngine) -> Owner:
    """Return the connection of an attached engine to its owner."""
    backend = engine.parts.backend
    assert isinstance(backend, AttachedBackend)
    return backend.owner


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until something holds; fail after :data:`HANGING` seconds."""
    async with asyncio.timeout(HANGING):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.01)


def tried_again(test: Callable[_P, Awaitable[None]]) -> Callable[_P, Awaitable[None]]:
    """Run a test again that came :class:`TooLate`: a request had ended before it was acted upon."""

    @functools.wraps(test)
    async def again(*arguments: _P.args, **fixtures: _P.kwargs) -> None:
        for _ in range(_ATTEMPTS - 1):
            with suppress(TooLate):
                return await test(*arguments, **fixtures)
        await test(*arguments, **fixtures)

    return again


async def tensors_for(engine: InferenceEngine) -> dict[str, torch.Tensor]:
    """Return random weights for every tensor that an update must bring."""
    manifest = await engine.weight_manifest()
    return {
        spec.name: torch.randn(spec.shape, dtype=getattr(torch, spec.dtype)).mul_(0.05) for spec in manifest.tensors
    }
