"""A weight update that a holder of the engine begins in one call and ends in another."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

from drivetrain.engine.weight_transaction import WeightTransaction


class HeldUpdate:
    """Runs an update in a task of its own, from its begin until it is told to commit or to break off.

    A context that is entered in one call and left in another belongs to no task. When the event loop shuts down,
    asyncio closes the generators of such a context all at once, the outer ones before the inner ones have ended. A task
    is cancelled, and leaves them in order: the update breaks off.

    Args:
        update: The update's context, not entered.
    """

    def __init__(self, update: AbstractAsyncContextManager[WeightTransaction]) -> None:
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[WeightTransaction] = loop.create_future()
        self._verdict: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._run(update))
        self._task.add_done_callback(_retrieve)

    async def _run(self, update: AbstractAsyncContextManager[WeightTransaction]) -> None:
        async with update as transaction:
            self._begun.set_result(transaction)
            await self._verdict

    async def begin(self) -> WeightTransaction:
        """Begin the update; raise the error with which it refuses. If this call is cancelled, so is the update."""
        either: list[asyncio.Future[Any]] = [self._task, self._begun]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not self._begun.done():
            await self._task
        return self._begun.result()

    async def commit(self) -> None:
        """Verify and commit; raise the error with which that fails."""
        if not self._verdict.done():
            self._verdict.set_result(None)
        await self._task

    async def break_off(self, error: Exception) -> None:
        """Make the update fail with ``error``, which is not raised here; do nothing if the update has ended."""
        if self._task.done():
            return
        if not self._verdict.done():
            self._verdict.set_exception(error)
        try:
            await self._task
        except Exception as raised:
            if raised is not error:
                raise


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark a task's error as seen: it is raised where the update is ended, so asyncio must not log it."""
    if not task.cancelled():
        task.exception()
