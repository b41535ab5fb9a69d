"""Pushes from a rank that has no engine: it sends its shards to the rank that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from drivetrain_weight_sync.shards.contributor import Contributor
from drivetrain_weight_sync.trainer.staging import Staged
from drivetrain_weight_sync.trainer.strategy import Strategy
from drivetrain_weight_sync.transports.threads import in_thread

ResultT = TypeVar("ResultT")


class RankPush(Generic[ResultT]):
    """The steps of an ``EnginePush``, on a rank that has no engine.

    Args:
        shards: Returns names and tensors of this rank's part of the weights.
        contributor: Sends it to the rank that pushes.
        kind: The result of a push.
    """

    strategy = Strategy.AUTO

    def __init__(
        self, shards: Callable[[], Iterable[tuple[str, object]]], contributor: Contributor, kind: type[ResultT]
    ) -> None:
        self._shards = shards
        self._contributor = contributor
        self._kind = kind

    async def stage(self, version: str, staged: Staged, *, gpu_share: float) -> None:
        """Send this rank's shards as they are asked for."""
        contributor, shards = self._contributor, self._shards
        await in_thread(lambda: contributor.stage(version, shards), contributor.close)

    async def update(self, ready: None) -> ResultT:
        """Wait until the engine serves the weights; return the result of the rank that pushes."""
        contributor = self._contributor
        return msgspec.convert(await in_thread(contributor.finish, contributor.close), self._kind)

    async def let_go(self) -> None:
        """Do nothing: this rank learns at the next push how this one ended."""

    async def close(self) -> None:
        """Close the connection to the rank that pushes."""
        self._contributor.close()
