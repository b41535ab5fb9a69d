"""Weights that OpenRLHF's trainer broadcasts, one tensor a call, or shares through CUDA IPC."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec
import torch

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.types.weights import TensorSpec
from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket
from drivetrain_weight_sync.trainer_groups.bucket_layout import BucketLayout
from drivetrain_weight_sync.trainer_groups.process_messages import AnyJoin, Join, JoinNccl
from drivetrain_weight_sync.trainer_groups.trainer_group import TrainerGroup
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

IpcHandles = Mapping[str, tuple[Callable[..., torch.Tensor], Sequence[object]]]
"""By UUID of a GPU: the function that opens a tensor there, and its arguments."""
_DEVICE_ARGUMENT: Final = 6
"""Index of the device among the arguments of ``torch.multiprocessing.reductions.rebuild_cuda_tensor``."""


class TrainerWeights:
    """Receives each tensor as it comes, and commits all of them as one update.

    The engine serves its old weights until the last tensor has come. The trainer counts ``tensor_parallel_size`` ranks
    for each engine; a process joins for each, because the group forms only once all have. The first one receives, and
    the others discard.

    Args:
        engine: The engine, started.
        ranks: Ranks that the trainer counts for it.
    """

    def __init__(self, engine: InferenceEngine, ranks: int) -> None:
        self._ranks = ranks
        self._timeout = engine.config.timeouts.weight_update
        self._groups = WeightGroups(engine, cast=False)
        self._group_name: str | None = None
        self._others: list[TrainerGroup] = []

    async def join(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the trainer's group with all ranks that it counts for this engine; leave the one before.

        Raises:
            InvalidRequest: The backend is unknown, needs a GPU, or the ranks are not in the group.
            DeadlineExceeded, WeightSyncError: The group did not form.
        """
        await self._leave_others()
        with self._groups.releasing(address, port, world_size):
            first = await asyncio.to_thread(self._join, address, port, rank_offset, world_size, group_name, backend)
            joins = [msgspec.structs.replace(first, rank=first.rank + gpu, gpu=gpu) for gpu in range(1, self._ranks)]
            self._others = [TrainerGroup(join) for join in joins]
            try:
                await gather_or_cancel([self._groups.init(first), *(other.join() for other in self._others)])
            except BaseException:
                await self._leave_others()
                raise
        self._group_name = group_name

    def _join(self, address: str, port: int, rank: int, world_size: int, group_name: str, backend: str) -> AnyJoin:
        if rank + self._ranks > world_size:
            raise InvalidRequest(
                f"rank_offset={rank} and world_size={world_size}: this engine has {self._ranks} ranks from its offset "
                "on; give OpenRLHF the engine's tensor_parallel_size",
                field="rank_offset",
            )
        if forms_bare_communicator(backend):
            return JoinNccl(
                group_name=group_name,
                rank=rank,
                world_size=world_size,
                timeout=self._timeout,
                master_address=address,
                master_port=port,
            )
        return Join(
            group_name=group_name,
            rank=rank,
            world_size=world_size,
            timeout=self._timeout,
            master_address=address,
            master_port=port,
            backend=_known(backend),
        )

    async def receive(self, spec: TensorSpec, *, last: bool) -> None:
        """Receive one broadcast; commit the update with the last one.

        A tensor that the engine cannot take is received and then refused, because the trainer broadcasts it anyway.

        Raises:
            InvalidRequest: No group has formed, or the tensor cannot be taken.
            WeightPlanMismatch: The engine has no such tensor, or tensors are missing after the last one.
            DeadlineExceeded, WeightSyncError: The trainer is gone. The engine is as before.
            DrivetrainError: as ``WeightSync.push``.
        """
        if self._group_name is None:
            raise InvalidRequest("the trainer has formed no group; call init_process_group first")
        bucket = WeightBucket(group_name=self._group_name, specs=(spec,), chunk_bytes=None)
        pieces = BucketLayout(bucket).pieces
        received, *discarded = await asyncio.gather(
            self._received(bucket),
            *(other.receive(pieces, None, 0) for other in self._others),
            return_exceptions=True,
        )
        if received is not None:
            raise received
        if (lost := next(filter(None, discarded), None)) is not None:
            await self._groups.abandon(bucket.group_name)
            raise lost
        if last:
            await self._groups.commit_open_update()

    async def _received(self, bucket: WeightBucket) -> None:
        try:
            await self._groups.receive(bucket)
        except BaseException:
            if not self._groups.has(bucket.group_name):
                # Without this rank no broadcast ends: the others would wait until their deadline.
                await self._leave_others()
            raise

    async def open(self, spec: TensorSpec, handles: IpcHandles, *, last: bool) -> None:
        """Copy a tensor out of a trainer's GPU memory; commit the update with the last one.

        Raises:
            UnsupportedCapability: No trainer shares memory of a GPU that this process sees.
            InvalidRequest, WeightPlanMismatch: as :meth:`receive`.
            DrivetrainError: as ``WeightSync.push``.
        """
        tensor = await asyncio.to_thread(_copied, handles)
        bucket = WeightBucket(group_name="CUDA IPC", specs=(spec,), chunk_bytes=None)
        await self._groups.add(bucket, {spec.name: tensor})
        if last:
            await self._groups.commit_open_update()

    async def close(self) -> None:
        """Leave the group, and drop an open update."""
        await self._leave_others()
        await self._groups.close()

    async def _leave_others(self) -> None:
        others, self._others, self._group_name = self._others, [], None
        for other in others:
            await other.end()


def forms_bare_communicator(backend: str) -> bool:
    """Return whether the trainer forms a bare NCCL communicator, and no torch.distributed group.

    OpenRLHF 0.8.9 and later do, for any name of the backend. Where OpenRLHF is not installed, ``nccl`` means one.
    """
    try:
        utilities = importlib.import_module("openrlhf.utils.distributed_util")
    except ImportError:
        return backend == "nccl"
    return hasattr(utilities, "stateless_init_process_group")


def _known(backend: str) -> Literal["nccl", "gloo"]:
    match backend:
        case "nccl" | "gloo":
            return backend
        case _:
            raise InvalidRequest(f"backend={shown(backend)}: expected 'nccl' or 'gloo'", field="backend")


def _copied(handles: IpcHandles) -> torch.Tensor:
    """Open the handle of a GPU that this process sees; return a copy on the CPU."""
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    for index, uuid in enumerate(seen):
        if uuid in handles:
            rebuild, given = handles[uuid]
            arguments = list(given)
            arguments[_DEVICE_ARGUMENT] = index  # the processes may number the GPUs differently
            return rebuild(*arguments).cpu()
    raise UnsupportedCapability(
        f"CUDA IPC: the trainer shares memory of the GPUs {', '.join(handles) or 'none'}, and the engine's actor sees "
        f"{', '.join(seen) or 'none'}; put both on one GPU (--train.colocate_all), or let the trainer broadcast"
    )
