"""Pushes from a rank that has no engine: it sends its shards to the rank that has one."""

from __future__ import annotations

import msgspec

from drivetrain_weight_sync.shards.contributor import Contributor
from drivetrain_weight_sync.trainer.result import WeightSyncResult
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged
from drivetrain_weight_sync.trainer.strategy import Strategy
from drivetrain_weight_sync.transports.threads import in_thread


class RankPush:
    """The steps of an ``EnginePush``, on a rank that has no engine.

    Args:
        source: This rank's part of the weights.
        contributor: Sends it to the rank that pushes.
    """

    strategy = Strategy.AUTO

    def __init__(self, source: Source, contributor: Contributor) -> None:
        self._source = source
        self._contributor = contributor

    async def stage(self, version: str, staged: Staged, *, gpu_share: float) -> None:
        """Send this rank's shards as they are asked for."""
        contributor, source = self._contributor, self._source
        await in_thread(lambda: contributor.stage(version, source.shards), contributor.close)

    async def update(self, ready: None) -> WeightSyncResult:
        """Wait until the engine serves the weights; return the result of the rank that pushes."""
        contributor = self._contributor
        return msgspec.convert(await in_thread(contributor.finish, contributor.close), WeightSyncResult)

    async def let_go(self) -> None:
        """Do nothing: this rank learns at the next push how this one ended."""

    async def close(self) -> None:
        """Close the connection to the rank that pushes."""
        self._contributor.close()
