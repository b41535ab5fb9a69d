"""Waiting for many tasks at once, and cancelling them without holding the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import TypeVar

from drivetrain.checks.limits import SAMPLES_AT_ONCE

_T = TypeVar("_T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Await all coroutines; if one fails, cancel the others before its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks)
        raise


async def cancel_all(tasks: Sequence[asyncio.Task[_T]]) -> None:
    """Cancel tasks, a few at each turn of the event loop, and wait until they have ended."""
    left = [task for task in tasks if not task.done()]
    try:
        while left:
            some, left = left[:SAMPLES_AT_ONCE], left[SAMPLES_AT_ONCE:]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    except BaseException:
        for task in left:
            task.cancel()
        raise
