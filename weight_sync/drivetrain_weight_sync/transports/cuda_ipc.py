"""CUDA IPC transport: the engine maps GPU memory of the trainer's process, an arena or the trainer's own tensors."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.types.weights import CudaIpcSource, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import bucket_offsets, plan_nbytes
from drivetrain_weight_sync.copying.waiting import wait_for
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender, Slots, slot
from drivetrain_weight_sync.transports.device_memory import (
    HANDLE_BYTES,
    DeviceArena,
    MappedSegment,
    Segment,
    handle_of,
    segment_of,
    uuid_of,
)

_SEGMENT: Final = np.dtype([("handle", "V", HANDLE_BYTES), ("gpu", "<i8"), ("nbytes", "<i8")])
"""Layout of an entry of ``CudaIpcSource.segments``."""


class CudaIpcSender(Sender):
    """Copies each tensor to its place in the arena.

    Args:
        device: The GPU on which the arena is allocated.
    """

    release_blocks = False

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
        """Return the tensors' places in the arena."""
        return self._slots

    def source(self) -> CudaIpcSource:
        """Describe the arena, after waiting for the copies into it."""
        arena, plan = self._arena, self._plan
        assert arena is not None
        assert plan is not None
        wait_for(arena.device)
        if self._source is None:
            offsets = [
                offset + placed.offset
                for bucket, offset in zip(plan.buckets, bucket_offsets(plan), strict=True)
                for placed in bucket.tensors
            ]
            segment = Segment(handle=arena.handle, gpu=uuid_of(arena.device), nbytes=arena.nbytes)
            self._source = source_of([segment], [(0, offset) for offset in offsets])
        return self._source

    def close(self) -> None:
        """Free the arena."""
        self._slots, self._plan, self._source = {}, None, None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class CudaIpcInPlaceSender(Sender):
    """Shares the trainer's own tensors: nothing is copied, and no extra memory is used."""

    copies = False
    keeps = True
    release_blocks = False

    def __init__(self) -> None:
        self._plan = WeightPlan(())
        self._dtypes: dict[str, torch.dtype] = {}
        self._put: dict[str, tuple[int, torch.device]] = {}
        """Address and device of each tensor."""
        self._unfit: dict[str, str] = {}
        """Reasons why tensors cannot be shared, by name."""
        self._source: CudaIpcSource | None = None
        self._freed = 0
        """Number of segments that torch had freed when the source was made."""

    def begin(self, plan: WeightPlan) -> None:
        """Forget the tensors' places if the plan has changed."""
        self._unfit = {}
        if plan != self._plan:
            self._plan, self._put, self._source = plan, {}, None
            self._dtypes = {spec.name: dtype_of(spec) for spec in plan.tensors}

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Record where the tensor is."""
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

    def put_derived(self, name: str, tensor: torch.Tensor, derived: DerivedTensor) -> None:
        """Record that the tensor has no memory of its own to share."""
        self._unfit[name] = "merged with an adapter"

    def source(self) -> CudaIpcSource:
        """Describe the memory that holds the tensors.

        Raises:
            InvalidRequest: a tensor cannot be shared.
        """
        if self._unfit:
            named = listed([f"{name} ({why})" for name, why in self._unfit.items()])
            raise InvalidRequest(
                "share_tensors needs contiguous tensors on a GPU, of the engine's dtypes; these cannot be shared: "
                f"{named}; nothing was changed. Connect without share_tensors",
                field="share_tensors",
            )
        freed = self._segments_freed()
        if self._source is None or freed != self._freed:
            self._source, self._freed = self._described(), freed
        return self._source

    def forget(self) -> None:
        """Describe the memory again at the next push: the engine may have mapped memory that was since replaced."""
        self._source = None

    def _segments_freed(self) -> int:
        """Count the segments that torch has freed: a new one at the same address must be mapped again."""
        devices = {device for _, device in self._put.values()}
        return sum(torch.cuda.memory_stats(device).get("segment.all.freed", 0) for device in devices)

    def _described(self) -> CudaIpcSource:
        segments: list[Segment] = []
        numbers: dict[int, int] = {}
        """Index of each segment, by its first address."""
        places: list[tuple[int, int]] = []
        for spec in self._plan.tensors:
            pointer, device = self._put[spec.name]
            begin, size = segment_of(pointer, device)
            if begin not in numbers:
                try:
                    handle = handle_of(begin, device)
                except WeightSyncError as error:
                    raise InvalidRequest(
                        f"the memory of {spec.name} cannot be shared ({error}), for example because it is in torch's "
                        "expandable segments; nothing was changed. Connect without share_tensors",
                        field="share_tensors",
                    ) from error
                numbers[begin] = len(segments)
                segments.append(Segment(handle=handle, gpu=uuid_of(device), nbytes=size))
            places.append((numbers[begin], pointer - begin))
        return source_of(segments, places)

    def close(self) -> None:
        """Forget the tensors' places."""
        self._plan, self._put, self._source = WeightPlan(()), {}, None


class CudaIpcReader(Reader):
    """Maps memory at the first update and keeps it mapped: mapping and unmapping 15 GB takes 110 ms.

    The owner must not free mapped memory: before that, the trainer has the engine unmap it.
    """

    def __init__(self) -> None:
        self._mapped: list[MappedSegment] = []
        self._name: str | None = None
        self._plan = WeightPlan(())
        self._places: Mapping[str, tuple[int, int]] = {}

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Map the memory unless it is mapped already, and check that the tensors lie within it."""
        source, plan, digests = request.source, request.plan, request.digests
        assert isinstance(source, CudaIpcSource)
        assert plan is not None
        assert digests is not None
        if self._name != source.name or self._plan != plan:
            self.close()
            places = places_in(source, plan)
            device = torch.device("cuda", torch.cuda.current_device())
            try:
                for segment in segments_of(source):
                    self._mapped.append(MappedSegment(segment, device))
            except BaseException:
                self.close()
                raise
            self._name, self._plan, self._places = source.name, plan, places
        return Opened(plan, digests)

    @property
    def holds(self) -> bool:
        """True: tensors are views of memory that stays where it is."""
        return True

    @property
    def place(self) -> Hashable:
        """Name and addresses of the mapping: after an unmap the same name may be mapped elsewhere."""
        return self._name, tuple(segment.memory.data_ptr() for segment in self._mapped)

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the mapped memory."""
        slots = [Slots(segment.memory) for segment in self._mapped]
        for placed in self._plan.buckets[index].tensors:
            segment, offset = self._places[placed.spec.name]
            yield placed.spec.name, slots[segment].view(offset - placed.offset, placed)

    def release(self) -> None:
        """Keep the mapping for the next update."""

    def close(self) -> None:
        """Unmap the memory."""
        mapped, self._mapped, self._name = self._mapped, [], None
        for segment in mapped:
            segment.close()


def places_in(source: CudaIpcSource, plan: WeightPlan) -> dict[str, tuple[int, int]]:
    """Return segment index and byte offset of each tensor of the plan.

    Raises:
        InvalidRequest: the source has too few or too many places, or one outside its segment.
    """
    tensors = [placed for bucket in plan.buckets for placed in bucket.tensors]
    if len(source.places) != 16 * len(tensors):
        raise InvalidRequest(
            f"places has {len(source.places)} bytes for a plan of {len(tensors)} tensors; each takes 16",
            field="source.places",
        )
    found: dict[str, tuple[int, int]] = {}
    sizes = [segment.nbytes for segment in segments_of(source)]
    numbers: list[list[int]] = np.frombuffer(source.places, "<i8").reshape(-1, 2).tolist()
    for placed, (index, offset) in zip(tensors, numbers, strict=True):
        size = sizes[index] if 0 <= index < len(sizes) else -1
        if offset < 0 or offset + placed.nbytes > size or offset % dtype_of(placed.spec).itemsize:
            raise InvalidRequest(
                f"the source places {placed.spec.name} ({placed.nbytes} bytes) at byte {offset} of segment {index}, "
                f"of {len(sizes)}; it must lie within one, at a multiple of its elements' size",
                field="source.places",
            )
        found[placed.spec.name] = index, offset
    return found


def segments_of(source: CudaIpcSource) -> list[Segment]:
    """Return the memory segments of a source.

    Raises:
        InvalidRequest: an entry has the wrong size, or names an unknown GPU.
    """
    if len(source.segments) % _SEGMENT.itemsize:
        raise InvalidRequest(
            f"segments has {len(source.segments)} bytes; each takes {_SEGMENT.itemsize}", field="source.segments"
        )
    segments: list[Segment] = []
    for handle, gpu, nbytes in np.frombuffer(source.segments, _SEGMENT).tolist():
        if not 0 <= gpu < len(source.gpus) or nbytes < 0:
            raise InvalidRequest(
                f"the source places a segment of {nbytes} bytes on GPU {gpu}, but names {len(source.gpus)} GPUs",
                field="source.segments",
            )
        segments.append(Segment(handle, source.gpus[gpu], nbytes))
    return segments


def source_of(segments: Sequence[Segment], places: Sequence[tuple[int, int]]) -> CudaIpcSource:
    """Describe segments, and for each tensor the index of its segment and the byte offset in it."""
    gpus = list(dict.fromkeys(segment.gpu for segment in segments))
    packed = np.array([(segment.handle, gpus.index(segment.gpu), segment.nbytes) for segment in segments], _SEGMENT)
    return CudaIpcSource(
        name=uuid.uuid4().hex,
        gpus=tuple(gpus),
        segments=packed.tobytes(),
        places=np.array(places, dtype="<i8").tobytes(),
    )


def can_map(trainers: torch.device | None, engines: Sequence[str]) -> bool:
    """Return whether all GPUs of the engine can read the trainer's: each is the same GPU, or a peer of it.

    If the engine does not report its GPUs, return whether there is only one.
    """
    if trainers is None:
        return False
    return can_read(engines, uuid_of(trainers)) if engines else torch.cuda.device_count() == 1


def can_read(engines: Sequence[str], there: str) -> bool:
    """Return whether these GPUs can all read the memory of the GPU ``there``; false if this process does not see it."""
    visible = {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    return there in visible and all(
        uuid == there or (uuid in visible and torch.cuda.can_device_access_peer(visible[uuid], visible[there]))
        for uuid in engines
    )
