# pyright: reportMissingImports=false
"""One arena in a GPU's memory, made once by the trainer's process and mapped by the engine's for each update."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.weights import CudaIpcSource, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.plan import bucket_offsets, plan_nbytes
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender, check_fit, slot

HANDLE_BYTES = 64
"""Size of CUDA's handle of a piece of memory."""


def is_available() -> bool:
    """Whether the bindings of CUDA are there that this is made of; torch brings them. Nothing is imported."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


class DeviceArena:
    """Memory of a GPU that other processes can map by ``handle``; apart from torch's allocator, which moves things.

    Args:
        nbytes: Its size.
        device: The GPU.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from cuda.bindings import runtime

        self.name = uuid.uuid4().hex
        self.nbytes = nbytes
        self.device = device
        with torch.cuda.device(device):
            pointer = _call(runtime.cudaMalloc, max(nbytes, 1))
            self._free = weakref.finalize(self, _free, pointer, device)
            self.handle = bytes(_call(runtime.cudaIpcGetMemHandle, pointer).reserved)
        self.memory = _tensor_at(pointer, max(nbytes, 1), device)
        """uint8 ``[nbytes]``."""

    def close(self) -> None:
        """Give the memory back."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._free()


class MappedDeviceArena:
    """Another process's arena on the same GPU, or on one whose memory this one can read.

    Raises:
        InvalidRequest: the handle is of no memory in reach of this GPU, or of less than ``nbytes``.
    """

    def __init__(self, handle: bytes, nbytes: int, device: torch.device) -> None:
        from cuda.bindings import driver, runtime

        self._device = device
        if len(handle) != HANDLE_BYTES:
            raise InvalidRequest(
                f"the handle has {len(handle)} bytes; one of CUDA has {HANDLE_BYTES}", field="source.handles"
            )
        given = runtime.cudaIpcMemHandle_t()
        given.reserved = handle
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context that the handle is opened in
            try:
                self._pointer = _call(runtime.cudaIpcOpenMemHandle, given, runtime.cudaIpcMemLazyEnablePeerAccess)
            except WeightSyncError as error:
                raise InvalidRequest(
                    f"the memory on the GPU cannot be mapped ({error}); trainer and engine must be two processes of "
                    "one host, and the trainer's WeightSync must be open",
                    field="source.handles",
                ) from error
        size = int(_call(driver.cuMemGetAddressRange, self._pointer)[1])
        if size < nbytes:
            self.close()
            raise InvalidRequest(
                f"the memory on the GPU has {size} bytes, but the source says {nbytes}; push again from the trainer",
                field="source.nbytes",
            )
        self.memory = _tensor_at(self._pointer, max(nbytes, 1), device)
        """uint8 ``[nbytes]``; not to be written to."""

    def close(self) -> None:
        """Let go of it, once all that was launched on the GPU has read it."""
        from cuda.bindings import runtime

        self.memory = torch.empty(0, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _call(runtime.cudaIpcCloseMemHandle, self._pointer)


class CudaIpcSender(Sender):
    """Copies each tensor to its place in the arena.

    Args:
        device: The GPU that trainer and engine share.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena: DeviceArena | None = None
        self._offsets: tuple[int, ...] = ()
        self._slots: dict[str, torch.Tensor] = {}
        self._plan: WeightPlan | None = None

    def begin(self, plan: WeightPlan) -> None:
        """Make the arena, unless that of the last push has the same plan."""
        if self._arena is not None and self._plan == plan:
            return
        self.close()
        self._arena = arena = DeviceArena(plan_nbytes(plan), self._device)
        self._plan, self._offsets = plan, bucket_offsets(plan)
        self._slots = {
            placed.spec.name: slot(arena.memory, offset, placed)
            for bucket, offset in zip(plan.buckets, self._offsets, strict=True)
            for placed in bucket.tensors
        }

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Copy the tensor into the arena."""
        self._slots[name].copy_(tensor)

    def slots(self) -> Mapping[str, torch.Tensor]:
        """The places in the arena."""
        return self._slots

    def source(self) -> CudaIpcSource:
        """Name the arena, once the copies into it have been made."""
        assert self._arena is not None
        torch.cuda.synchronize(self._arena.device)
        handles = {uuid_of(self._arena.device): self._arena.handle}
        return CudaIpcSource(
            arena=self._arena.name, handles=handles, nbytes=self._arena.nbytes, bucket_offsets=self._offsets
        )

    def release(self) -> None:
        """Keep the arena for the next push."""

    def close(self) -> None:
        """Free the arena."""
        self._slots, self._plan = {}, None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class CudaIpcReader(Reader):
    """Maps the arena at the first update and keeps it mapped: for 15 GB that and letting go take 110 ms.

    The owner may only free what nobody maps: a trainer that is done has the engine let go before.
    """

    def __init__(self) -> None:
        self._mapped: MappedDeviceArena | None = None
        self._arena = ""
        self._plan = WeightPlan(())
        self._offsets: tuple[int, ...] = ()

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Map the arena that lies on this GPU, and check that the plan fits it."""
        source, plan, digests = request.source, request.plan, request.digests
        assert isinstance(source, CudaIpcSource)
        assert plan is not None
        assert digests is not None
        check_fit(source.bucket_offsets, source.nbytes, plan)
        device = torch.device("cuda", torch.cuda.current_device())
        holder = _in_reach(device, source.handles)
        if holder is None:
            raise InvalidRequest(
                f"the weights lie on {', '.join(source.handles) or 'no GPU'}, but this engine runs on "
                f"{uuid_of(device)}, which does not reach there; use strategy 'broadcast', or put trainer and engine "
                "on one GPU",
                field="source.handles",
            )
        if self._mapped is None or self._arena != source.arena:
            self.close()
            self._mapped, self._arena = MappedDeviceArena(source.handles[holder], source.nbytes, device), source.arena
        self._plan, self._offsets = plan, source.bucket_offsets
        return Opened(plan, digests)

    @property
    def place(self) -> Hashable:
        """Where the arena is mapped."""
        assert self._mapped is not None
        return self._mapped.memory.data_ptr(), self._offsets

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the arena."""
        assert self._mapped is not None
        for placed in self._plan.buckets[index].tensors:
            yield placed.spec.name, slot(self._mapped.memory, self._offsets[index], placed)

    def release(self) -> None:
        """Keep the mapping for the next update."""

    def close(self) -> None:
        """Let go of the mapping."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _in_reach(device: torch.device, uuids: Collection[str]) -> str | None:
    """Which of these GPUs is this one, or else one whose memory it can read."""
    for index in (device.index, *range(torch.cuda.device_count())):
        uuid = uuid_of(torch.device("cuda", index))
        if uuid in uuids and (index == device.index or torch.cuda.can_device_access_peer(device, index)):
            return uuid
    return None


def shares_gpu(trainers: torch.device | None, engines: Sequence[str]) -> bool:
    """Whether an engine is on the trainer's GPU with all its ranks; one that does not say, if there is no other."""
    if trainers is None:
        return False
    return {*engines} == {uuid_of(trainers)} if engines else torch.cuda.device_count() == 1


def uuid_of(device: torch.device) -> str:
    """The GPU's name that is the same in every process, such as ``GPU-e6f9517c-…``."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    # Said to be on this device wherever it lies: what runs here reads it, also over the link between two GPUs.
    storage = torch._C._construct_storage_from_data_pointer(int(pointer), device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _free(pointer: int, device: torch.device) -> None:
    from cuda.bindings import runtime

    with torch.cuda.device(device):
        _call(runtime.cudaFree, pointer)


def _call(function: Any, *arguments: object) -> Any:
    error, *results = function(*arguments)
    if int(error) != 0:
        raise WeightSyncError(f"{function.__name__} returned {error.name}")
    return results[0] if len(results) == 1 else results
