"""Weights by SkyRL's requests: from a broadcast group, by CUDA IPC, and adapters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Final, Literal, Protocol, cast, runtime_checkable

import torch

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.types.weights import LoraSource, TensorSpec
from drivetrain.types.weights import WeightUpdateRequest as EngineUpdate
from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket
from drivetrain_weight_sync.trainer_groups.process_messages import Join
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

_BACKENDS: Final = ("gloo", "nccl")
IpcHandle = tuple[Callable[..., torch.Tensor], tuple[object, ...]]
"""A GPU tensor of another process, as ``torch.multiprocessing.reductions.reduce_tensor`` writes it."""
_DEVICE_ARGUMENT: Final = 6
"""Place of the device's index among an :data:`IpcHandle`'s arguments."""


# SkyRL's classes are told apart by their attributes: its package need not be installed.


@runtime_checkable
class WeightUpdateRequest(Protocol):
    """Tensors of one update, or some of them. ``weight_version``, if there is such an attribute, is the new version."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def dtypes(self) -> Sequence[str]: ...

    @property
    def shapes(self) -> Sequence[Sequence[int]]: ...


@runtime_checkable
class CudaIpcRequest(WeightUpdateRequest, Protocol):
    """Tensors that lie one after another in one buffer on a GPU of this host."""

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def ipc_handles(self) -> Mapping[str, IpcHandle]: ...


@runtime_checkable
class LoraLoadRequest(Protocol):
    """An adapter in a folder."""

    @property
    def lora_path(self) -> str: ...


@runtime_checkable
class BroadcastInfo(Protocol):
    """A torch.distributed group in which the trainer's rank 0 broadcasts."""

    @property
    def master_addr(self) -> str: ...

    @property
    def master_port(self) -> int: ...

    @property
    def rank_offset(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def group_name(self) -> str: ...

    @property
    def backend(self) -> str: ...


class WeightTransferHandle:
    """A request whose tensors come in the background. Made by ``SkyRLInferenceEngine.start_weight_transfer``.

    Args:
        request: SkyRL's request.
        transfer_task: Receives the tensors.
    """

    def __init__(self, request: WeightUpdateRequest, transfer_task: asyncio.Task[None]) -> None:
        self.request = request
        self.transfer_task = transfer_task

    @property
    def is_complete(self) -> bool:
        """True once the tensors have come."""
        return self.transfer_task.done() and self.error is None

    @property
    def error(self) -> BaseException | None:
        """The error with which the transfer failed; None otherwise."""
        task = self.transfer_task
        return task.exception() if task.done() and not task.cancelled() else None

    async def wait(self) -> None:
        """Wait until the tensors have come.

        Raises:
            DrivetrainError: They did not.
        """
        await asyncio.shield(self.transfer_task)


class WeightTransfers:
    """Receives tensors until the model is complete, and then updates the engine.

    Args:
        engine: The engine.
        cast: Round floating-point tensors to the engine's dtype; if false, they are refused.
    """

    def __init__(self, engine: InferenceEngine, *, cast: bool) -> None:
        self._engine = engine
        self._groups = WeightGroups(engine, cast=cast)
        self._group_name = ""

    async def join(self, info: object) -> None:
        """Form the group that SkyRL's init info describes, if the strategy needs one."""
        if not isinstance(info, BroadcastInfo):
            if hasattr(info, "ps_host"):
                raise UnsupportedCapability(f"{type(info).__name__}: a checkpoint engine's server cannot be joined")
            if not hasattr(info, "model_dtype_str"):
                raise InvalidRequest(
                    f"init_info={shown(info)}: expected SkyRL's BroadcastInitInfo or CudaIpcInitInfo", field="init_info"
                )
            _require_cuda()
            return
        with self._groups.releasing(info.master_addr, info.master_port, info.world_size):
            await self._join(info)
        self._group_name = info.group_name

    async def _join(self, info: BroadcastInfo) -> None:
        config = self._engine.config
        ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
        if ranks > 1:
            raise UnsupportedCapability(
                f"SkyRL's group has {ranks} ranks for this engine, and one process receives for all of it; use "
                "drivetrain's WeightSync, load_weights_from_disk, or CUDA IPC"
            )
        if info.backend not in _BACKENDS:
            raise InvalidRequest(f"backend={shown(info.backend)}: expected gloo or nccl", field="backend")
        if self._groups.has(info.group_name) and getattr(info, "override_existing_receiver", True) is False:
            return
        await self._groups.init(
            Join(
                group_name=info.group_name,
                rank=info.rank_offset,
                world_size=info.world_size,
                timeout=config.timeouts.weight_update,
                master_address=info.master_addr,
                master_port=info.master_port,
                backend=cast(Literal["gloo", "nccl"], info.backend),
            )
        )

    async def update(self, request: object) -> None:
        """Take the request's tensors, and update the engine if they are the last ones."""
        if isinstance(request, LoraLoadRequest):
            await self._update_adapter(request)
            return
        update = _checked(request)
        await self._receive(update)
        await self._apply_if_complete(update)

    def start(self, request: object) -> WeightTransferHandle:
        """Begin to receive tensors that :meth:`finish` applies."""
        if isinstance(request, LoraLoadRequest):
            raise InvalidRequest("an adapter is not transferred; give it to update_named_weights()", field="request")
        update = _checked(request)
        return WeightTransferHandle(update, asyncio.create_task(self._stage(update)))

    async def finish(self, handle: WeightTransferHandle) -> None:
        """Wait for the tensors; update the engine if they are the last ones."""
        await handle.wait()
        await self._apply_if_complete(handle.request)

    @property
    def complete(self) -> bool:
        """True if all tensors of the model have come, and were not applied."""
        return self._groups.complete

    def next_version(self) -> str:
        """Return the version of an update that names none."""
        return self._groups.next_version()

    async def close(self) -> None:
        """Leave all groups, and drop tensors that were not applied."""
        await self._groups.close()

    async def _apply_if_complete(self, request: WeightUpdateRequest) -> None:
        if self._groups.complete:
            await self._groups.end(_version(request))

    async def _stage(self, request: WeightUpdateRequest) -> None:
        if not self._groups.is_open:
            await self._groups.begin()
        await self._receive(request)

    async def _receive(self, request: WeightUpdateRequest) -> None:
        bucket = _bucket(request, self._group_name)
        if isinstance(request, CudaIpcRequest):
            _require_cuda()
            await self._groups.add(bucket, await asyncio.to_thread(_opened, request))
            return
        if not self._group_name:
            raise InvalidRequest(
                "no group is formed to receive weights in; call init_weight_update_communicator() first",
                field="request",
            )
        await self._groups.receive(bucket)

    async def _update_adapter(self, request: LoraLoadRequest) -> None:
        path = os.fspath(request.lora_path)
        source = LoraSource(lora_name=PurePath(path).name, path=path)
        version = getattr(request, "weight_version", None) or self.next_version()
        await self._engine.update_named_weights(EngineUpdate(version=version, source=source))


def _checked(request: object) -> WeightUpdateRequest:
    if not isinstance(request, WeightUpdateRequest) or hasattr(request, "bucket_id"):
        raise InvalidRequest(
            f"request={shown(request)}: expected SkyRL's BroadcastWeightUpdateRequest, CudaIpcWeightUpdateRequest or "
            "LoraLoadRequest",
            field="request",
        )
    if not len(request.names) == len(request.dtypes) == len(request.shapes):
        raise InvalidRequest(
            f"names, dtypes and shapes have {len(request.names)}, {len(request.dtypes)} and {len(request.shapes)} "
            "entries; expected as many of each",
            field="names",
        )
    return request


def _version(request: WeightUpdateRequest) -> str | None:
    version = getattr(request, "weight_version", None)
    if version is not None and (not isinstance(version, str) or not version):
        raise InvalidRequest(f"weight_version={shown(version)}: expected a text", field="weight_version")
    return version


def _bucket(request: WeightUpdateRequest, group_name: str) -> WeightBucket:
    specs = tuple(
        TensorSpec(name, dtype.removeprefix("torch."), tuple(shape))
        for name, dtype, shape in zip(request.names, request.dtypes, request.shapes, strict=True)
    )
    return WeightBucket(group_name, specs, chunk_bytes=None, version=_version(request))


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedCapability(
            "weights by CUDA IPC need a GPU in this process, and there is none; use a broadcast group"
        )


def _opened(request: CudaIpcRequest) -> dict[str, torch.Tensor]:
    """Return copies, in this process's memory, of the tensors in the trainer's buffer."""
    device, (rebuild, given) = _reachable(request.ipc_handles)
    arguments = list(given)
    arguments[_DEVICE_ARGUMENT] = device
    buffer = rebuild(*arguments).flatten()
    if sum(request.sizes) > buffer.numel():
        raise InvalidRequest(
            f"sizes add up to {sum(request.sizes)} elements, and the buffer has {buffer.numel()}", field="sizes"
        )
    parts = torch.split(buffer[: sum(request.sizes)], list(request.sizes))
    tensors = {
        name: part.view(tuple(shape)).cpu()
        for name, part, shape in zip(request.names, parts, request.shapes, strict=True)
    }
    torch.cuda.synchronize(device)
    return tensors


def _reachable(handles: Mapping[str, IpcHandle]) -> tuple[int, IpcHandle]:
    """Return the index of a GPU of this process whose memory one of the handles is in, and that handle."""
    for device in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        for name, handle in handles.items():
            if name.removeprefix("GPU-") == uuid:
                return device, handle
    raise UnsupportedCapability(
        f"ipc_handles are of the GPUs {', '.join(handles)}, none of which this process sees; run it on one of them"
    )
