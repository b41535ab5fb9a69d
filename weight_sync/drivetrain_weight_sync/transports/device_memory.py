# pyright: reportMissingImports=false
"""GPU memory that one process owns and another maps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain_weight_sync.copying.waiting import WAITING

HANDLE_BYTES = 64
"""Size of a CUDA IPC memory handle."""
_PAGE: Final = 2 << 20
"""A GPU's page size. Memory allocated in whole pages is read at full speed through a mapping; otherwise an eighth
slower (benchmarks/results/2026-11-23-h200-mapped-arenas.txt)."""


def is_available() -> bool:
    """Return whether the CUDA bindings, which come with torch, are installed. Nothing is imported."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


class DeviceArena:
    """GPU memory that other processes can map by ``handle``, apart from torch's allocator, so that it stays in place.

    Args:
        nbytes: Its size.
        device: The GPU.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from cuda.bindings import runtime

        self.nbytes = nbytes
        self.device = device
        with torch.cuda.device(device):
            pointer = _call(runtime.cudaMalloc, max(-(-nbytes // _PAGE), 1) * _PAGE)
            self._free = weakref.finalize(self, _free, pointer, device)
        self.handle = handle_of(pointer, device)
        self.memory = _tensor_at(pointer, max(nbytes, 1), device)
        """uint8 ``[nbytes]``."""

    def close(self) -> None:
        """Free the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._free()


@dataclass(frozen=True, slots=True)
class Segment:
    """An allocation of GPU memory."""

    handle: bytes
    """Its CUDA IPC handle, of ``HANDLE_BYTES``."""
    gpu: str
    """UUID of the GPU."""
    nbytes: int
    """Size in bytes."""


class MappedSegment:
    """Another process's memory on this GPU, or on a peer whose memory this one can read.

    Raises:
        InvalidRequest: this GPU cannot reach the memory, or the handle is invalid or of a smaller allocation.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        from cuda.bindings import runtime

        self._device = device
        if not reaches(device, segment.gpu):
            raise InvalidRequest(
                f"the weights are on {segment.gpu}, whose memory this engine's {uuid_of(device)} cannot read; use "
                "strategy 'broadcast', or put trainer and engine on one GPU",
                field="source.segments",
            )
        given = runtime.cudaIpcMemHandle_t()
        given.reserved = segment.handle
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # creates the context in which the handle is opened
            try:
                self._pointer = _call(runtime.cudaIpcOpenMemHandle, given, runtime.cudaIpcMemLazyEnablePeerAccess)
            except WeightSyncError as error:
                raise InvalidRequest(
                    f"the GPU memory cannot be mapped ({error}); trainer and engine must be two processes of "
                    "one host, and the trainer's WeightSync must be open",
                    field="source.segments",
                ) from error
        _, size = segment_of(self._pointer, device)
        if size < segment.nbytes:
            self.close()
            raise InvalidRequest(
                f"the mapped GPU memory has {size} bytes, but the source says {segment.nbytes}; push again from the "
                "trainer",
                field="source.segments",
            )
        self.memory = _tensor_at(self._pointer, max(segment.nbytes, 1), device)
        """uint8 ``[nbytes]``; not to be written to."""

    def close(self) -> None:
        """Unmap the memory, after waiting for launched work that reads it."""
        from cuda.bindings import runtime

        self.memory = torch.empty(0, dtype=torch.uint8)
        with torch.cuda.device(self._device), WAITING:
            torch.cuda.synchronize()
            _call(runtime.cudaIpcCloseMemHandle, self._pointer)


def reaches(device: torch.device, uuid: str) -> bool:
    """Return whether the GPU of this UUID is ``device``, or a peer whose memory it can read."""
    for index in range(torch.cuda.device_count()):
        if uuid == uuid_of(torch.device("cuda", index)):
            return index == device.index or torch.cuda.can_device_access_peer(device, index)
    return False


def uuid_of(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in every process, such as ``GPU-e6f9517c-…``."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def segment_of(pointer: int, device: torch.device) -> tuple[int, int]:
    """Return begin and size of the allocation that contains this address."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        begin, size = _call(driver.cuMemGetAddressRange, pointer)
    return int(begin), int(size)


def handle_of(pointer: int, device: torch.device) -> bytes:
    """Return the CUDA IPC handle of the allocation that begins there.

    Raises:
        WeightSyncError: it has none, as in torch's expandable segments.
    """
    from cuda.bindings import runtime

    with torch.cuda.device(device):
        return bytes(_call(runtime.cudaIpcGetMemHandle, pointer).reserved)


def _tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    # Declare the tensor on this device wherever the memory is: kernels here can also read a peer's memory.
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
