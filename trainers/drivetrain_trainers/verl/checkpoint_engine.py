# pyright: reportMissingImports=false
"""For replicas on GPUs of their own: the trainer's first rank pushes straight to their engines.

verl imports this module by ``rollout.checkpoint_engine.custom_backend_module``; ``backend=drivetrain`` chooses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from drivetrain.engine.engine import InferenceEngine
from drivetrain_fleet import InferenceEngineClient
from drivetrain_trainers.verl.attaching import attach_to
from drivetrain_trainers.verl.plugin_names import ROLLOUT
from drivetrain_trainers.verl.pushing import Pusher, Weights, push_and_gather
from drivetrain_trainers.verl.rollout import PUSHED, server_of_this_process

Arguments = dict[str, list[tuple[str, ...]]]


@CheckpointEngineRegistry.register(ROLLOUT)
class DirectPush(CheckpointEngine):
    """Sends the weights of an update to all engines at once. Workers of the replicas receive nothing.

    Args:
        bucket_size: Most bytes of a bucket.
        is_master: True on the trainer's rank that pushes.
    """

    wire_format: ClassVar[str] = PUSHED

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._servers: tuple[str, ...] = ()
        self._pusher: tuple[tuple[str, ...], Pusher] | None = None
        """The pusher with the servers that it pushes to."""

    def prepare(self) -> dict[str, str | None]:
        """Return the server that this worker belongs to; None on the trainer's ranks."""
        return {"server": server_of_this_process()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, str | None]]
    ) -> tuple[Arguments, Arguments]:
        """Tell every worker the names of all servers."""
        servers = tuple(dict.fromkeys(one["server"] or "" for one in metadata[actor_wg_world_size:]))
        return {"servers": [servers] * actor_wg_world_size}, {"servers": [servers] * rollout_world_size}

    def init_process_group(self, servers: Sequence[str]) -> None:
        """Take the names of the servers to push to."""
        self._servers = tuple(servers)

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Push the weights to all engines, or take part in gathering them.

        Raises:
            WeightSyncError: The push failed; its subclass says how the engines are left.
        """
        push = partial((await self._pushing()).push, step=global_steps) if self._is_master else None
        await push_and_gather(weights, push)

    async def _pushing(self) -> Pusher:
        if self._pusher is None or self._pusher[0] != self._servers:
            await self.close()
            engines = {server: await attach_to(server) for server in self._servers}
            self._pusher = self._servers, Pusher(await joined(engines), "the rollout", self._bucket_size)
        return self._pusher[1]

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the engines have the weights."""
        for _ in ():
            yield _

    def finalize(self) -> None:
        """Keep the connections for the next update."""

    async def close(self) -> None:
        """End the connections to the engines; the next update makes new ones. Idempotent."""
        pushing, self._pusher = self._pusher, None
        if pushing is not None:
            await pushing[1].close()


async def joined(engines: Mapping[str, InferenceEngine]) -> InferenceEngine:
    """Return one engine as it is, or several as a fleet, which one push updates."""
    if len(engines) == 1:
        return next(iter(engines.values()))
    fleet = InferenceEngineClient(engines, min_engines=len(engines))
    await fleet.start()
    return fleet
