# pyright: reportMissingImports=false
"""The rollout in a trainer's rank: wakes the replica's engine up, and pushes the weights to it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from drivetrain.attached.engine import AttachedEngine, attach
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain.types.handle import EngineHandle
from drivetrain.types.modes import MemoryTag
from drivetrain_fleet.ray.calls import call
from drivetrain_trainers.verl.names import server_name
from drivetrain_weight_sync import Strategy, WeightSync
from drivetrain_weight_sync.transports.cuda_ipc import can_map
from drivetrain_weight_sync.transports.threads import in_thread

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from verl.workers.config import HFModelConfig, RolloutConfig

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]
"""What verl hands over: named tensors, gathered one at a time by all ranks together."""

_logger: Final = logging.getLogger(__name__)


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
        self._engine: AttachedEngine | None = None
        self._sync: WeightSync | None = None
        self._weights: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: iter(())

    async def resume(self, tags: list[str]) -> None:
        """Allocate the engine's memory again: ``weights`` before an update, ``kv_cache`` after it."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await (await self._attached()).wake_up([MemoryTag(tag) for tag in tags])

    async def release(self) -> None:
        """Free the engine's memory."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await (await self._attached()).sleep([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])

    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: object = None,
        base_sync_done: bool = True,
    ) -> None:
        """Push the weights; the engine serves them as version ``str(global_steps)``.

        If the push fails, the rest is gathered all the same, for other ranks wait in the same gather.

        Args:
            weights: Named tensors; reading one gathers it from all ranks.
            global_steps: The trainer's step; None: the version stays as it is.
            wire_format: ``named_tensors``.
            peft_config: None; verl gives an adapter's configuration with the adapter's tensors.
            base_sync_done: Not used; it goes with adapters.

        Raises:
            InvalidConfig: ``wire_format`` is another one, or the tensors are an adapter's.
            WeightSyncError: The push failed; its subclass says how the engine is left.
        """
        if wire_format != "named_tensors":
            raise InvalidConfig(
                f"wire_format={shown(wire_format)}: expected 'named_tensors'; choose another "
                "actor_rollout_ref.rollout.checkpoint_engine.backend",
                field="wire_format",
            )
        if peft_config is not None:
            raise InvalidConfig(
                "peft_config is given: the drivetrain rollout takes merged weights, not adapters; add "
                "+actor_rollout_ref.model.lora.merge=true",
                field="peft_config",
            )
        reading = _read(weights, asyncio.get_running_loop())
        try:
            if self.is_leader_rank:
                await self._push(lambda: reading, global_steps)
        finally:
            await in_thread(lambda: _drain(reading))

    async def _push(self, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], step: int | None) -> None:
        engine = await self._attached()
        self._weights = weights
        if self._sync is None:
            self._sync = WeightSync.connect(
                lambda: self._weights(),
                engine,
                _strategy(engine),
                bucket_bytes=self.config.checkpoint_engine.update_weights_bucket_megabytes << 20,
                cast=True,  # verl's rollout.dtype says what the engine has
            )
        result = await self._sync.push(version=engine.get_weight_version() if step is None else str(step))
        _logger.info(
            "replica %d has version %s: %d tensors, %d bytes by %s in %.0f ms, paused for %.0f ms",
            self.replica_rank,
            result.version,
            result.tensors,
            result.nbytes,
            result.strategy.value,
            1e3 * result.total_seconds,
            1e3 * result.paused_seconds,
        )

    async def _attached(self) -> AttachedEngine:
        """Attach to the replica's engine at first use: verl makes the rollout before it starts the engine."""
        if self._engine is None:
            handle = await call(ray.get_actor(server_name(self.replica_rank)), "handle")
            assert isinstance(handle, EngineHandle)
            self._engine = await attach(handle)
        return self._engine


def _strategy(engine: AttachedEngine) -> Strategy:
    """Return CUDA IPC if the engine can read this rank's GPU; ``AUTO`` cannot tell the GPU of a streamed source."""
    if Capability.WEIGHTS_CUDA_IPC in engine.capabilities and torch.cuda.is_available():
        if can_map(torch.device("cuda", torch.cuda.current_device()), engine.gpus):
            return Strategy.CUDA_IPC
    return Strategy.AUTO


def _read(weights: Weights, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in whatever thread reads them, on this thread's GPU and without gradients, as verl does."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    return _reading(_from_loop(weights, loop) if isinstance(weights, AsyncIterator) else iter(weights), device)


def _reading(pairs: Iterator[tuple[str, torch.Tensor]], device: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    while True:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.no_grad():
            pair = next(pairs, None)
        if pair is None:
            return
        yield pair


def _from_loop(
    weights: AsyncIterator[tuple[str, torch.Tensor]], loop: asyncio.AbstractEventLoop
) -> Iterator[tuple[str, torch.Tensor]]:
    async def following() -> tuple[str, torch.Tensor] | None:
        with torch.no_grad():  # each thread has a switch of its own
            return await anext(weights, None)

    while (pair := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
        yield pair


def _drain(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in weights:
        pass


__all__ = ["DrivetrainRollout"]
