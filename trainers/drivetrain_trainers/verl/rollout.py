# pyright: reportMissingImports=false
"""The rollout in a trainer's rank: wakes the replica's engine up, and pushes the weights to it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from verl.workers.rollout.base import BaseRollout

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.types.modes import MemoryTag
from drivetrain_trainers.verl.adapters import AdapterPusher, sleeping_memory, without_wrappers
from drivetrain_trainers.verl.attaching import attach_to
from drivetrain_trainers.verl.plugin_names import server_name
from drivetrain_trainers.verl.pushing import Pairs, Pusher, Weights, push_and_gather

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from verl.workers.config import HFModelConfig, RolloutConfig

PUSHED: Final = "pushed"
"""``wire_format`` of weights that the trainer has pushed to the engine itself."""

_here: str | None = None


def server_of_this_process() -> str | None:
    """Return the name of the server that this process's rollout belongs to; None without a rollout."""
    return _here


class DrivetrainRollout(BaseRollout):
    """Connects a trainer's rank to its replica's engine.

    The first rank of a replica attaches to the engine and pushes: the weights go from its process straight to the
    engine's host process. The others take part in gathering each tensor.

    Args:
        config: ``actor_rollout_ref.rollout``.
        model_config: ``actor_rollout_ref.model``.
        device_mesh: verl's mesh of ranks; not used.
        replica_rank: Rank of the replica; -1: that of this process's rank in the trainer.
    """

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh | None, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._engine: InferenceEngine | None = None
        self._pusher: Pusher | None = None
        self._adapter_pusher: AdapterPusher | None = None
        global _here
        _here = server_name(self.replica_rank)

    async def resume(self, tags: list[str]) -> None:
        """Allocate the engine's memory again: ``weights`` before an update, ``kv_cache`` after it."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await (await self._attached()).wake_up([MemoryTag(tag) for tag in tags])

    async def release(self) -> None:
        """Free the engine's memory."""
        if self.config.free_cache_engine and self.is_leader_rank:
            engine = await self._attached()
            await engine.sleep(sleeping_memory(engine.config))

    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Mapping[str, object] | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Push the weights, or an adapter's; the engine serves them as version ``str(global_steps)``.

        Args:
            weights: Named tensors; reading one gathers it from all ranks.
            global_steps: The trainer's step, for the version; None: the version stays.
            wire_format: ``named_tensors``; or ``pushed``, if the trainer has pushed the weights itself.
            peft_config: The fields of an adapter's configuration; None: verl trains none, or merges it.
            base_sync_done: With ``peft_config``, true if the tensors are the adapter's, and false if they are the base
                weights, which verl sends before the first adapter if ``rollout.load_format`` is ``dummy``.

        Raises:
            InvalidConfig: ``wire_format`` is another one.
            InvalidRequest: The engine does not serve such an adapter.
            WeightSyncError: The push failed; its subclass says how the engine is left.
        """
        if wire_format == PUSHED:
            return
        if wire_format != "named_tensors":
            raise InvalidConfig(
                f"wire_format={shown(wire_format)}: expected 'named_tensors'; choose another "
                "actor_rollout_ref.rollout.checkpoint_engine.backend",
                field="wire_format",
            )
        push = await self._push(global_steps, peft_config, base_sync_done) if self.is_leader_rank else None
        await push_and_gather(weights, push)

    async def _push(
        self, step: int | None, peft_config: Mapping[str, object] | None, base_sync_done: bool
    ) -> Callable[[Pairs], Awaitable[None]]:
        engine, name = await self._attached(), f"replica {self.replica_rank}"
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        if peft_config is not None and base_sync_done:
            if self._adapter_pusher is None:
                self._adapter_pusher = AdapterPusher(engine, name, bucket_bytes)
            return partial(self._adapter_pusher.push, step=step, config=peft_config)
        if self._pusher is None:
            self._pusher = Pusher(engine, name, bucket_bytes)
        push = self._pusher.push
        if peft_config is None:
            return partial(push, step=step)
        return lambda weights: push(without_wrappers(weights), step)

    async def _attached(self) -> InferenceEngine:
        """Attach to the replica's engine at first use: verl makes the rollout before it starts the engine."""
        if self._engine is None:
            self._engine = await attach_to(server_name(self.replica_rank))
        return self._engine
