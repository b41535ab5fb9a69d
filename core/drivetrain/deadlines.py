"""Waits that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from drivetrain.errors import DeadlineExceeded


@asynccontextmanager
async def deadline(seconds: float | None, waited_for: str) -> AsyncIterator[None]:
    """Bound what is awaited within.

    Raises:
        DeadlineExceeded: naming what was waited for and for how long.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"waited {seconds:g} s for {waited_for}; it did not come") from error
