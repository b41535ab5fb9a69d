"""A weight update whose tensors are staged in the background while generation goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from drivetrain.errors import WeightSyncError
from drivetrain.weights import WeightUpdateRequest


class WeightTransferHandle:
    """A transfer under way. Made by ``InferenceEngine.start_weight_transfer``."""

    def __init__(
        self,
        request: WeightUpdateRequest,
        staging: Coroutine[object, object, None],
        apply: Callable[[WeightUpdateRequest], Awaitable[None]],
    ) -> None:
        self.request = request
        self._staging = asyncio.create_task(staging)
        self._apply = apply
        self._given_up = False

    @property
    def staged(self) -> bool:
        """Whether every tensor lies ready in the engine's own memory, to be applied by :meth:`finish`."""
        staging = self._staging
        return not self._given_up and staging.done() and not staging.cancelled() and staging.exception() is None

    async def wait(self) -> None:
        """Wait until every tensor is staged; raises what went wrong.

        Raises:
            WeightSyncError: the transfer was cancelled.
        """
        await asyncio.wait({self._staging})
        if self._given_up or self._staging.cancelled():
            raise WeightSyncError(f"the transfer of {self.request.version!r} was cancelled; start another")
        self._staging.result()

    async def cancel(self) -> None:
        """Give the transfer up, staged or not; the engine goes on with the weights it has."""
        self._given_up = True
        self._staging.cancel()
        await asyncio.gather(self._staging, return_exceptions=True)

    async def finish(self) -> None:
        """Wait for the staging, then pause, apply, verify and commit.

        Raises:
            WeightSyncError: the transfer was cancelled.
        """
        await self.wait()
        await self._apply(self.request)
