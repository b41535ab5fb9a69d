"""An adapter that several ranks hold, gathered by the rank that pushes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import torch

from drivetrain_weight_sync.shards.gatherer import Gatherer
from drivetrain_weight_sync.trainer.pushed_adapter import PushedAdapter
from drivetrain_weight_sync.transports.threads import in_thread

if TYPE_CHECKING:
    from pydantic import JsonValue


class GatheredAdapter:
    """A :class:`PushedAdapter` whose tensors are whole after :meth:`gather`, and are dropped by :meth:`committed`.

    Args:
        adapter: This rank's part.
        gatherer: Gathers the other ranks' parts.
    """

    def __init__(self, adapter: PushedAdapter, gatherer: Gatherer) -> None:
        self._adapter = adapter
        self._gatherer = gatherer
        self.tensors: Mapping[str, torch.Tensor] = {}

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Fields of ``adapter_config.json``."""
        return self._adapter.config

    async def gather(self, version: str) -> None:
        """Wait for the other ranks, and put the tensors together.

        Raises:
            TrainerRankLost, DeadlineExceeded: a rank is gone, or does not push.
            InvalidRequest: another rank has an engine too, or pushes another version.
            WeightPlanMismatch: the shards do not make up every tensor.
            DrivetrainError: the error of a rank that could not read its adapter.
        """
        gatherer = self._gatherer

        def fetch() -> dict[str, torch.Tensor]:
            gatherer.meet(version, lambda: self._adapter.tensors.items(), dict)
            return {name: tensor.clone() for bucket in gatherer.buckets() for name, tensor in bucket.items()}

        self.tensors = await in_thread(fetch, gatherer.interrupt)

    async def staged(self) -> None:
        """Tell the other ranks that they may change their parts."""
        await in_thread(self._gatherer.staged)

    async def committed(self, result: object) -> None:
        """Tell the other ranks how the push went."""
        self.tensors = {}
        await in_thread(lambda: self._gatherer.committed(msgspec.to_builtins(result)))

    @contextmanager
    def releasing_ranks_if_it_fails(self) -> Iterator[None]:
        """Tell the other ranks of an error within."""
        try:
            yield
        except BaseException as error:
            self.tensors = {}
            self._gatherer.failed(error)
            raise

    async def close(self) -> None:
        """Leave the other ranks."""
        await in_thread(self._gatherer.close)
