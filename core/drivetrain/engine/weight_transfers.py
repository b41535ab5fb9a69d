"""A weight update that is staged in the background while generation goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from drivetrain.errors import WeightSyncError

_Result = TypeVar("_Result")
_Staged = TypeVar("_Staged")


async def _nothing() -> None:
    """Do nothing."""


class WeightTransferHandle(Generic[_Result]):
    """A transfer under way. Made by ``InferenceEngine.start_weight_transfer`` and ``WeightSync.start_weight_transfer``.

    Args:
        version: The version of the new weights.
        staging: Copies every tensor to the place that :meth:`finish` reads from.
        apply: Pauses, loads, verifies and commits the staged tensors.
        let_go: Called once, when the transfer has finished, failed or been cancelled.
        progress: Returns the staged fraction, from 0 to 1.
    """

    def __init__(
        self,
        version: str,
        staging: Coroutine[Any, Any, _Staged],
        apply: Callable[[_Staged], Awaitable[_Result]],
        let_go: Callable[[], Awaitable[None]] = _nothing,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.version = version
        self._staging = asyncio.create_task(staging)
        self._apply = apply
        self._let_go = let_go
        self._progress = progress
        self._ended = ""
        """Result of the transfer: "finished", "failed" or "cancelled"; "" until it ends."""

    @property
    def staged(self) -> bool:
        """True when every tensor is staged and :meth:`finish` will not wait."""
        staging = self._staging
        return not self._ended and staging.done() and not staging.cancelled() and staging.exception() is None

    @property
    def progress(self) -> float:
        """The staged fraction, from 0 to 1; 1 means :attr:`staged`."""
        return 1.0 if self.staged else self._progress()

    @property
    def over(self) -> bool:
        """True once the transfer has finished, failed or been cancelled."""
        staging = self._staging
        return bool(self._ended) or (staging.done() and (staging.cancelled() or staging.exception() is not None))

    async def wait(self) -> None:
        """Wait until every tensor is staged; raise the error if staging failed.

        Raises:
            WeightSyncError: the transfer was finished or cancelled.
        """
        await asyncio.wait({self._staging})
        if self._ended or self._staging.cancelled():
            raise WeightSyncError(
                f"the transfer of {self.version!r} was {self._ended or 'cancelled'}; start another one"
            )
        if self._staging.exception() is not None:
            await self._end("failed")
        self._staging.result()

    async def cancel(self) -> None:
        """Cancel the transfer, staged or not; the engine keeps its weights. Idempotent."""
        self._staging.cancel()
        await asyncio.wait({self._staging})
        await self._end("cancelled")

    async def finish(self) -> _Result:
        """Wait for the staging, then pause, apply, verify and commit.

        Raises:
            WeightSyncError: the transfer was finished or cancelled before.
        """
        await self.wait()
        try:
            return await self._apply(self._staging.result())
        finally:
            await self._end("finished")

    async def _end(self, how: str) -> None:
        if not self._ended:
            self._ended = how
            await self._let_go()
