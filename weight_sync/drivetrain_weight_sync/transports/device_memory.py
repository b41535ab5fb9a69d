# pyright: reportMissingImports=false
"""Memory of a GPU that one process owns and another maps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from drivetrain.errors import InvalidRequest, WeightSyncError

HANDLE_BYTES = 64
"""Size of CUDA's handle of a piece of memory."""
_PAGE: Final = 2 << 20
"""Of a GPU's memory. What is allocated by whole pages is read by who maps it as fast as by its owner; else, an eighth
slower (benchmarks/results/2026-11-23-h200-mapped-arenas.txt)."""


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

        self.nbytes = nbytes
        self.device = device
        with torch.cuda.device(device):
            pointer = _call(runtime.cudaMalloc, max(-(-nbytes // _PAGE), 1) * _PAGE)
            self._free = weakref.finalize(self, _free, pointer, device)
        self.handle = handle_of(pointer, device)
        self.memory = _tensor_at(pointer, max(nbytes, 1), device)
        """uint8 ``[nbytes]``."""

    def close(self) -> None:
        """Give the memory back."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._free()


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a GPU's memory, as it was allocated."""

    handle: bytes
    """CUDA's IPC handle of it, of ``HANDLE_BYTES``."""
    gpu: str
    """UUID of the GPU."""
    nbytes: int
    """Size in bytes."""


class MappedSegment:
    """Another process's memory on the same GPU, or on one whose memory this one can read.

    Raises:
        InvalidRequest: it is out of reach of this GPU, the handle is of no memory, or of less than is said.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        from cuda.bindings import runtime

        self._device = device
        if not reaches(device, segment.gpu):
            raise InvalidRequest(
                f"the weights lie on {segment.gpu}, but this engine runs on {uuid_of(device)}, which does not reach "
                "there; use strategy 'broadcast', or put trainer and engine on one GPU",
                field="source.segments",
            )
        given = runtime.cudaIpcMemHandle_t()
        given.reserved = segment.handle
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context that the handle is opened in
            try:
                self._pointer = _call(runtime.cudaIpcOpenMemHandle, given, runtime.cudaIpcMemLazyEnablePeerAccess)
            except WeightSyncError as error:
                raise InvalidRequest(
                    f"the memory on the GPU cannot be mapped ({error}); trainer and engine must be two processes of "
                    "one host, and the trainer's WeightSync must be open",
                    field="source.segments",
                ) from error
        _, size = segment_of(self._pointer, device)
        if size < segment.nbytes:
            self.close()
            raise InvalidRequest(
                f"the memory on the GPU has {size} bytes, but the source says {segment.nbytes}; push again from the "
                "trainer",
                field="source.segments",
            )
        self.memory = _tensor_at(self._pointer, max(segment.nbytes, 1), device)
        """uint8 ``[nbytes]``; not to be written to."""

    def close(self) -> None:
        """Let go of it, once all that was launched on the GPU has read it."""
        from cuda.bindings import runtime

        self.memory = torch.empty(0, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _call(runtime.cudaIpcCloseMemHandle, self._pointer)


def reaches(device: torch.device, uuid: str) -> bool:
    """Whether the GPU of this UUID is this one, or else one whose memory it can read."""
    for index in range(torch.cuda.device_count()):
        if uuid == uuid_of(torch.device("cuda", index)):
            return index == device.index or torch.cuda.can_device_access_peer(device, index)
    return False


def uuid_of(device: torch.device) -> str:
    """The GPU's name that is the same in every process, such as ``GPU-e6f9517c-…``."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def segment_of(pointer: int, device: torch.device) -> tuple[int, int]:
    """Where the memory begins that was allocated as one and holds this address, and how many bytes it has."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        begin, size = _call(driver.cuMemGetAddressRange, pointer)
    return int(begin), int(size)


def handle_of(pointer: int, device: torch.device) -> bytes:
    """CUDA's handle of the memory that begins there.

    Raises:
        WeightSyncError: it has none, as that of torch's expandable segments.
    """
    from cuda.bindings import runtime

    with torch.cuda.device(device):
        return bytes(_call(runtime.cudaIpcGetMemHandle, pointer).reserved)


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
