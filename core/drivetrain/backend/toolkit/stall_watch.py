"""Detection of stalled engines: stuck in one request, or waiting for a dead device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DeadlineExceeded, EngineDied, EngineError


async def ended(backend: Backend, requests: Callable[[], int]) -> EngineError:
    """Wait until the engine dies or stalls, and return the reason.

    Args:
        backend: The engine.
        requests: Returns the number of requests in flight.
    """
    watching = [asyncio.create_task(backend.died()), asyncio.create_task(stalled(backend, requests))]
    try:
        done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in watching:
            task.cancel()


async def stalled(backend: Backend, requests: Callable[[], int]) -> EngineDied:
    """Wait until the engine has requests but makes no step for longer than allowed, and return an error.

    The check asks for statistics, because engines answer between two steps. The limit is never shorter than
    ``timeouts.weight_update``, the deadline of a weight update's steps.
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
            asked.exception()  # retrieved so that asyncio does not log it; the engine did make a step
