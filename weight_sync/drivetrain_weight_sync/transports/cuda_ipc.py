"""Memory of a GPU that the trainer's process owns and the engine's maps: an arena, or the trainer's own tensors."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.types.weights import CudaIpcSource, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import bucket_offsets, plan_nbytes
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.tensors.names import listed
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender, slot
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
"""As ``CudaIpcSource.segments`` has them."""


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
        self._freed = 0
        """Pieces of memory that had been given back when the source was made."""

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
        freed = self._segments_freed()
        if self._source is None or freed != self._freed:
            self._source, self._freed = self._described(), freed
        return self._source

    def forget(self) -> None:
        """Name the memory anew: what the engine maps may not be what lies there now."""
        self._source = None

    def _segments_freed(self) -> int:
        """How many pieces of memory torch has given back so far: another may lie where one was, and be mapped anew."""
        devices = {device for _, device in self._put.values()}
        return sum(torch.cuda.memory_stats(device).get("segment.all.freed", 0) for device in devices)

    def _described(self) -> CudaIpcSource:
        segments: list[Segment] = []
        numbers: dict[int, int] = {}
        """Of the segments, by where they begin."""
        places: list[tuple[int, int]] = []
        for spec in self._plan.tensors:
            pointer, device = self._put[spec.name]
            begin, size = segment_of(pointer, device)
            if begin not in numbers:
                try:
                    handle = handle_of(begin, device)
                except WeightSyncError as error:
                    raise InvalidRequest(
                        f"the memory of {spec.name} cannot be shared ({error}): that of torch's expandable segments, "
                        "say, cannot; nothing was changed. Connect without share_tensors",
                        field="share_tensors",
                    ) from error
                numbers[begin] = len(segments)
                segments.append(Segment(handle=handle, gpu=uuid_of(device), nbytes=size))
            places.append((numbers[begin], pointer - begin))
        return source_of(segments, places)

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
                for segment in segments_of(source):
                    self._mapped.append(MappedSegment(segment, device))
            except BaseException:
                self.close()
                raise
            self._name, self._plan, self._places = source.name, plan, places
        return Opened(plan, digests)

    @property
    def place(self) -> Hashable:
        """Where the memory is mapped: what was let go of may come back elsewhere, under the same name."""
        return self._name, tuple(segment.memory.data_ptr() for segment in self._mapped)

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
    sizes = [segment.nbytes for segment in segments_of(source)]
    numbers: list[list[int]] = np.frombuffer(source.places, "<i8").reshape(-1, 2).tolist()
    for placed, (index, offset) in zip(tensors, numbers, strict=True):
        size = sizes[index] if 0 <= index < len(sizes) else -1
        if offset < 0 or offset + placed.nbytes > size or offset % dtype_of(placed.spec).itemsize:
            raise InvalidRequest(
                f"{placed.spec.name} ({placed.nbytes} bytes) is said to begin at byte {offset} of segment {index}, of "
                f"{len(sizes)}; it must lie within one, at a multiple of its elements' size",
                field="source.places",
            )
        found[placed.spec.name] = index, offset
    return found


def segments_of(source: CudaIpcSource) -> list[Segment]:
    """The memory in which a source's tensors lie.

    Raises:
        InvalidRequest: the source does not say how large each piece is, or on which GPU.
    """
    if len(source.segments) % _SEGMENT.itemsize:
        raise InvalidRequest(
            f"segments has {len(source.segments)} bytes; each takes {_SEGMENT.itemsize}", field="source.segments"
        )
    segments: list[Segment] = []
    for handle, gpu, nbytes in np.frombuffer(source.segments, _SEGMENT).tolist():
        if not 0 <= gpu < len(source.gpus) or nbytes < 0:
            raise InvalidRequest(
                f"a segment of {nbytes} bytes is said to be on GPU {gpu} of the {len(source.gpus)} that are named",
                field="source.segments",
            )
        segments.append(Segment(handle, source.gpus[gpu], nbytes))
    return segments


def source_of(segments: Sequence[Segment], places: Sequence[tuple[int, int]]) -> CudaIpcSource:
    """Say in which memory tensors lie: of each, the index of its segment, and where in it it begins, in bytes."""
    gpus = list(dict.fromkeys(segment.gpu for segment in segments))
    packed = np.array([(segment.handle, gpus.index(segment.gpu), segment.nbytes) for segment in segments], _SEGMENT)
    return CudaIpcSource(
        name=uuid.uuid4().hex,
        gpus=tuple(gpus),
        segments=packed.tobytes(),
        places=np.array(places, dtype="<i8").tobytes(),
    )


def can_map(trainers: torch.device | None, engines: Sequence[str]) -> bool:
    """Whether all of an engine's GPUs can read the memory of the trainer's: they are that one, or linked to it.

    Of an engine that does not say where it is, whether there is no other GPU.
    """
    if trainers is None:
        return False
    if not engines:
        return torch.cuda.device_count() == 1
    there = uuid_of(trainers)
    visible = {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    return all(
        uuid == there or (uuid in visible and torch.cuda.can_device_access_peer(visible[uuid], visible[there]))
        for uuid in engines
    )
