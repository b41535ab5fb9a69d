# pyright: reportMissingImports=false
"""Memory of a GPU that the trainer's process owns and the engine's maps: an arena, or the trainer's own tensors."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.weights import CudaIpcSegment, CudaIpcSource, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.dtypes import dtype_of
from drivetrain_weight_sync.names import listed
from drivetrain_weight_sync.plan import bucket_offsets, plan_nbytes
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender, slot

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


class MappedSegment:
    """Another process's memory on the same GPU, or on one whose memory this one can read.

    Raises:
        InvalidRequest: it is out of reach of this GPU, the handle is of no memory, or of less than is said.
    """

    def __init__(self, segment: CudaIpcSegment, device: torch.device) -> None:
        from cuda.bindings import driver, runtime

        self._device = device
        if len(segment.handle) != HANDLE_BYTES:
            raise InvalidRequest(
                f"the handle has {len(segment.handle)} bytes; one of CUDA has {HANDLE_BYTES}", field="source.segments"
            )
        if not _reaches(device, segment.gpu):
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
        size = int(_call(driver.cuMemGetAddressRange, self._pointer)[1])
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


class CudaIpcSender(Sender):
    """Copies each tensor to its place in the arena.

    Args:
        device: The GPU that trainer and engine share.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena: DeviceArena | None = None
        self._slots: dict[str, torch.Tensor] = {}
        self._plan: WeightPlan | None = None
        self._source: CudaIpcSource | None = None

    def begin(self, plan: WeightPlan) -> None:
        """Make the arena, unless that of the last push has the same plan."""
        if self._arena is not None and self._plan == plan:
            return
        self.close()
        self._arena = arena = DeviceArena(plan_nbytes(plan), self._device)
        self._plan = plan
        self._slots = {
            placed.spec.name: slot(arena.memory, offset, placed)
            for bucket, offset in zip(plan.buckets, bucket_offsets(plan), strict=True)
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
        arena, plan = self._arena, self._plan
        assert arena is not None
        assert plan is not None
        torch.cuda.synchronize(arena.device)
        if self._source is None:
            offsets = [
                offset + placed.offset
                for bucket, offset in zip(plan.buckets, bucket_offsets(plan), strict=True)
                for placed in bucket.tensors
            ]
            segment = CudaIpcSegment(handle=arena.handle, gpu=uuid_of(arena.device), nbytes=arena.nbytes)
            self._source = _source([segment], [(0, offset) for offset in offsets])
        return self._source

    def release(self) -> None:
        """Keep the arena for the next push."""

    def close(self) -> None:
        """Free the arena."""
        self._slots, self._plan, self._source = {}, None, None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class CudaIpcInPlaceSender(Sender):
    """Says where the trainer's own tensors lie: nothing is copied, and no memory taken."""

    copies = False
    keeps = True

    def __init__(self) -> None:
        self._plan = WeightPlan(())
        self._dtypes: dict[str, torch.dtype] = {}
        self._put: dict[str, tuple[int, torch.device]] = {}
        """Where each tensor lies."""
        self._unfit: dict[str, str] = {}
        """Why tensors cannot be read where they are."""
        self._source: CudaIpcSource | None = None

    def begin(self, plan: WeightPlan) -> None:
        """Forget where tensors of another plan lie."""
        self._unfit = {}
        if plan != self._plan:
            self._plan, self._put, self._source = plan, {}, None
            self._dtypes = {spec.name: dtype_of(spec) for spec in plan.tensors}

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Note where the tensor lies."""
        dtype = self._dtypes[name]
        why = {
            "streamed": not held,
            f"on {tensor.device.type}": not tensor.is_cuda,
            f"of {tensor.dtype}, not {dtype}": tensor.dtype != dtype,
            "not contiguous": not tensor.is_contiguous(),
        }
        if any(why.values()):
            self._unfit[name] = next(what for what, so in why.items() if so)
            return
        place = tensor.data_ptr(), tensor.device
        if self._put.get(name) != place:
            self._put[name], self._source = place, None

    def source(self) -> CudaIpcSource:
        """Name the memory in which the tensors lie.

        Raises:
            InvalidRequest: a tensor cannot be read where it is.
        """
        if self._unfit:
            named = listed([f"{name} ({why})" for name, why in self._unfit.items()])
            raise InvalidRequest(
                "share_tensors needs contiguous tensors on a GPU, of the engine's dtypes, which these are not: "
                f"{named}; nothing was changed. Connect without share_tensors",
                field="share_tensors",
            )
        if self._source is None:
            self._source = self._described()
        return self._source

    def _described(self) -> CudaIpcSource:
        from cuda.bindings import driver, runtime

        segments: list[CudaIpcSegment] = []
        numbers: dict[int, int] = {}
        """Of the segments, by where they begin."""
        places: list[tuple[int, int]] = []
        for spec in self._plan.tensors:
            pointer, device = self._put[spec.name]
            with torch.cuda.device(device):
                found, size = _call(driver.cuMemGetAddressRange, pointer)
                begin = int(found)
                if begin not in numbers:
                    try:
                        handle = _call(runtime.cudaIpcGetMemHandle, begin)
                    except WeightSyncError as error:
                        raise InvalidRequest(
                            f"the memory of {spec.name} cannot be shared ({error}): that of torch's expandable "
                            "segments, say, cannot; nothing was changed. Connect without share_tensors",
                            field="share_tensors",
                        ) from error
                    numbers[begin] = len(segments)
                    segments.append(
                        CudaIpcSegment(handle=bytes(handle.reserved), gpu=uuid_of(device), nbytes=int(size))
                    )
            places.append((numbers[begin], pointer - begin))
        return _source(segments, places)

    def release(self) -> None:
        """Remember where the tensors lie."""

    def close(self) -> None:
        """Forget it."""
        self._plan, self._put, self._source = WeightPlan(()), {}, None


class CudaIpcReader(Reader):
    """Maps memory at the first update and keeps it mapped: for 15 GB that and letting go take 110 ms.

    The owner may only free what nobody maps: a trainer that is done has the engine let go before.
    """

    def __init__(self) -> None:
        self._mapped: list[MappedSegment] = []
        self._name: str | None = None
        self._plan = WeightPlan(())
        self._places: Mapping[str, tuple[int, int]] = {}

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Map the memory, unless it is, and check that the tensors lie within."""
        source, plan, digests = request.source, request.plan, request.digests
        assert isinstance(source, CudaIpcSource)
        assert plan is not None
        assert digests is not None
        if self._name != source.name or self._plan != plan:
            self.close()
            places = places_in(source, plan)
            device = torch.device("cuda", torch.cuda.current_device())
            try:
                for segment in source.segments:
                    self._mapped.append(MappedSegment(segment, device))
            except BaseException:
                self.close()
                raise
            self._name, self._plan, self._places = source.name, plan, places
        return Opened(plan, digests)

    @property
    def place(self) -> Hashable:
        """Where the memory is mapped."""
        return self._name

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the memory."""
        for placed in self._plan.buckets[index].tensors:
            segment, offset = self._places[placed.spec.name]
            yield placed.spec.name, slot(self._mapped[segment].memory, offset - placed.offset, placed)

    def release(self) -> None:
        """Keep the mapping for the next update."""

    def close(self) -> None:
        """Let go of the mapping."""
        mapped, self._mapped, self._name = self._mapped, [], None
        for segment in mapped:
            segment.close()


def places_in(source: CudaIpcSource, plan: WeightPlan) -> dict[str, tuple[int, int]]:
    """Where each tensor of the plan lies: its segment, and the offset in it, in bytes.

    Raises:
        InvalidRequest: the source does not say so of each, or says of one that it lies elsewhere than in a segment.
    """
    tensors = [placed for bucket in plan.buckets for placed in bucket.tensors]
    if len(source.places) != 16 * len(tensors):
        raise InvalidRequest(
            f"places has {len(source.places)} bytes for a plan of {len(tensors)} tensors; each takes 16",
            field="source.places",
        )
    found: dict[str, tuple[int, int]] = {}
    numbers: list[list[int]] = np.frombuffer(source.places, "<i8").reshape(-1, 2).tolist()
    for placed, (index, offset) in zip(tensors, numbers, strict=True):
        size = source.segments[index].nbytes if 0 <= index < len(source.segments) else -1
        if offset < 0 or offset + placed.nbytes > size or offset % dtype_of(placed.spec).itemsize:
            raise InvalidRequest(
                f"{placed.spec.name} ({placed.nbytes} bytes) is said to begin at byte {offset} of segment {index}, of "
                f"{len(source.segments)}; it must lie within one, at a multiple of its elements' size",
                field="source.places",
            )
        found[placed.spec.name] = index, offset
    return found


def _source(segments: Sequence[CudaIpcSegment], places: Sequence[tuple[int, int]]) -> CudaIpcSource:
    numbers = np.array(places, dtype="<i8").tobytes()
    return CudaIpcSource(name=uuid.uuid4().hex, segments=tuple(segments), places=numbers)


def _reaches(device: torch.device, uuid: str) -> bool:
    """Whether the GPU of this UUID is this one, or else one whose memory it can read."""
    for index in range(torch.cuda.device_count()):
        if uuid == uuid_of(torch.device("cuda", index)):
            return index == device.index or torch.cuda.can_device_access_peer(device, index)
    return False


def shares_gpu(trainers: torch.device | None, engines: Sequence[str]) -> bool:
    """Whether an engine is on the trainer's GPU, and its other ranks, if any, on GPUs that read that one's memory.

    Of an engine that does not say where it is, whether there is no other GPU.
    """
    if trainers is None:
        return False
    if not engines:
        return torch.cuda.device_count() == 1
    there = uuid_of(trainers)
    visible = {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    return there in engines and all(
        uuid == there or (uuid in visible and torch.cuda.can_device_access_peer(visible[uuid], visible[there]))
        for uuid in engines
    )


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
