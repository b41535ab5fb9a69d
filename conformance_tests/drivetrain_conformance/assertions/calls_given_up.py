"""Calls whose caller leaves before they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Final

from drivetrain_conformance.harness.time_limits import within

MOMENTS: Final = (0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005)
"""Seconds after which the caller of a short call leaves."""


async def given_up(call: Coroutine[object, object, None], after: float) -> None:
    """Cancel a call ``after`` some seconds, if it has not ended; return once it has."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(after)
    task.cancel()
    async with within("the end of the cancelled call"):
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
