"""Watching for an engine that makes no step any more: stuck in one request, or waiting for a dead device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DeadlineExceeded, EngineDied, EngineError


async def ended(backend: Backend, requests: Callable[[], int]) -> EngineError:
    """Return, when the engine has ended or makes no step any more, why; never return otherwise.

    Args:
        backend: The engine.
        requests: How many requests it has.
    """
    watching = [asyncio.create_task(backend.died()), asyncio.create_task(stalled(backend, requests))]
    try:
        done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in watching:
            task.cancel()


async def stalled(backend: Backend, requests: Callable[[], int]) -> EngineDied:
    """Return when the engine has requests and makes no step for longer than any may take.

    Its statistics are asked for, as engines answer between two steps. Steps of a weight update have a deadline of
    their own, which is no shorter.
    """
    timeouts = backend.config.timeouts
    seconds = max(timeouts.step, timeouts.weight_update)
    while True:
        await asyncio.sleep(seconds / 4)
        if not requests():
            continue
        asked = asyncio.ensure_future(backend.stats())
        try:
            async with deadline(seconds, "statistics"):
                await asyncio.wait([asked])
        except DeadlineExceeded:
            return EngineDied(
                f"the {backend.name} engine made no step for {seconds:g} s, with {requests()} requests in flight; "
                "something that it does for one of them does not end, or takes longer than timeouts.step and "
                "timeouts.weight_update"
            )
        finally:
            asked.cancel()
        if not asked.cancelled():
            asked.exception()  # an engine that answers with an error makes steps
