"""Awaited work that a cancelled caller does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

_T = TypeVar("_T")


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
            cancelled.add_note(f"The uninterrupted work failed: {type(failure).__name__}: {failure}")
        raise cancelled
    return task.result()
