"""Waiting for many tasks at once, cancelling them without holding the event loop, and work that is not interrupted."""

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


async def to_its_end(work: Coroutine[object, object, _T]) -> _T:
    """Await work that must not be interrupted; a caller that is cancelled gets ``CancelledError`` once it has ended.

    The work must bound its own time.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled():
        if (failure := task.exception()) is not None:
            cancelled.add_note(f"The call that was under way failed: {type(failure).__name__}: {failure}")
        raise cancelled
    return task.result()


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
