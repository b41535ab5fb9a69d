"""Tensors in parts, each in memory of one rank of a sharded trainer, which the engine's ranks map and put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import torch

from drivetrain.errors import InvalidRequest
from drivetrain.types.weights import ShardsSource, TensorSpec, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.device_copies import DeviceCopies, DeviceCopy, fits, reaches
from drivetrain_weight_sync.copying.plan import place
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.transports.base import Opened, Reader, slot
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcReader
from drivetrain_weight_sync.transports.shared_memory import SharedMemoryReader

_READERS: Final[dict[str, type[CudaIpcReader] | type[SharedMemoryReader]]] = {
    "cuda_ipc": CudaIpcReader,
    "shared_memory": SharedMemoryReader,
}


class FlatPart(NamedTuple):
    """Consecutive elements of a flattened tensor."""

    tensor: int
    """Index of the tensor in the plan."""
    begin: int
    """Index of the first element."""
    numel: int


def packed(parts: Iterable[FlatPart]) -> bytes:
    """Return parts as in ``ShardsSource.parts``."""
    return np.array([*parts], dtype="<i8").reshape(-1, 3).tobytes()


def unpacked(data: bytes) -> list[FlatPart]:
    """Return the parts of a rank.

    Raises:
        InvalidRequest: the data is cut off.
    """
    if len(data) % 24:
        raise InvalidRequest(f"a rank's parts have {len(data)} bytes; each takes 24", field="source.parts")
    return [FlatPart(*numbers) for numbers in np.frombuffer(data, "<i8").reshape(-1, 3).tolist()]


def plan_of_parts(plan: WeightPlan, parts: Iterable[FlatPart]) -> WeightPlan:
    """Place a rank's parts in as many buckets as the plan has; each part is a tensor of one dimension.

    The sending rank computes the same places, so places need not be sent.
    """
    specs = plan.tensors
    return place(
        [TensorSpec(name_of(specs[part.tensor], part), specs[part.tensor].dtype, (part.numel,)) for part in bucket]
        for bucket in _in_buckets(plan, parts)
    )


def _in_buckets(plan: WeightPlan, parts: Iterable[FlatPart]) -> list[list[FlatPart]]:
    buckets: list[list[FlatPart]] = [[] for _ in plan.buckets]
    bucket_of = [index for index, bucket in enumerate(plan.buckets) for _ in bucket.tensors]
    for part in parts:
        buckets[bucket_of[part.tensor]].append(part)
    return buckets


def name_of(spec: TensorSpec, part: FlatPart) -> str:
    """Return the name of a part in its rank's plan."""
    return f"{spec.name}[{part.begin}:{part.begin + part.numel}]"


@dataclass(frozen=True, slots=True)
class _Rank:
    """The parts of a plan that one rank holds."""

    plan: WeightPlan
    buckets: list[list[FlatPart]]

    @classmethod
    def of(cls, plan: WeightPlan, parts: Sequence[FlatPart]) -> Self:
        return cls(plan_of_parts(plan, parts), _in_buckets(plan, parts))


class ShardsReader(Reader):
    """Puts a bucket's tensors together in memory of this rank, one bucket after the other.

    A tensor that one rank holds whole is read in place.
    """

    def __init__(self) -> None:
        self._readers: list[CudaIpcReader | SharedMemoryReader] = []
        """One for the memory of each rank."""
        self._ranks: list[_Rank] = []
        self._known: tuple[WeightPlan, tuple[bytes, ...]] | None = None
        """Plan and parts of ``_ranks``."""
        self._plan = WeightPlan(())
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bucket: dict[str, torch.Tensor] = {}
        """The tensors of the bucket brought last."""
        self._copies: dict[int, tuple[Hashable, list[DeviceCopies], list[DeviceCopy]]] = {}
        """For each bucket: the place for which they were made, copies made by the kernel, and all others."""

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Map the ranks' memory, and check that their parts make up every tensor of the plan."""
        source, plan, digests = request.source, request.plan, request.digests
        assert isinstance(source, ShardsSource)
        assert plan is not None
        assert digests is not None
        if (plan, source.parts) != self._known:
            parts = [unpacked(data) for data in source.parts]
            _require_whole(plan, parts, len(source.ranks))
            self._ranks = [_Rank.of(plan, of_rank) for of_rank in parts]
            self._known, self._copies = (plan, source.parts), {}
        self._plan = plan
        kinds = [_READERS[of_rank.kind] for of_rank in source.ranks]
        if [*map(type, self._readers)] != kinds:
            self._close_readers()
            self._readers = [kind() for kind in kinds]
        for reader, rank, of_rank in zip(self._readers, self._ranks, source.ranks, strict=True):
            reader.open(request.model_copy(update={"source": of_rank, "plan": rank.plan, "digests": {}}), manifest)
        return Opened(plan, digests)

    @property
    def place(self) -> Hashable:
        """Addresses of the ranks' memory and of this one's, if all are on a GPU."""
        places = [reader.place for reader in self._readers]
        return None if None in places else (*places, self._memory.data_ptr())

    def bring(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Put the tensors of one bucket together after the other, all in the same memory."""
        for index in indices:
            self._put_together(index)
            yield [index]

    def _put_together(self, index: int) -> None:
        parts = [
            (part, tensor)
            for reader, rank in zip(self._readers, self._ranks, strict=True)
            for part, (_, tensor) in zip(rank.buckets[index], reader.tensors(index), strict=True)
        ]
        bucket, specs = self._plan.buckets[index], self._plan.tensors
        device = parts[0][1].device if parts else torch.device("cpu")
        largest = max(bucket.nbytes for bucket in self._plan.buckets)
        if len(self._memory) < largest or self._memory.device != device:
            self._memory = torch.empty(largest, dtype=torch.uint8, device=device)
        by_tensor: dict[str, list[tuple[FlatPart, torch.Tensor]]] = defaultdict(list)
        for part, tensor in parts:
            by_tensor[specs[part.tensor].name].append((part, tensor))
        self._bucket, copies = {}, []
        for placed in bucket.tensors:
            name, shape = placed.spec.name, placed.spec.shape
            pieces = by_tensor[name]
            if len(pieces) == 1:
                self._bucket[name] = pieces[0][1].view(shape)
                continue
            self._bucket[name] = whole = slot(self._memory, 0, placed)
            flat = whole.view(-1)
            copies += [DeviceCopy(tensor, flat[part.begin : part.begin + part.numel]) for part, tensor in pieces]
        if device.type == "cpu":
            _copy_each(copies)
        else:
            self._copy_at_once(index, copies)

    def _copy_at_once(self, index: int, copies: list[DeviceCopy]) -> None:
        key = self.place
        if index not in self._copies or self._copies[index][0] != key:
            fitting = [copy for copy in copies if reaches(copy.source) and fits(copy)]
            rest = [copy for copy in copies if not (reaches(copy.source) and fits(copy))]
            self._copies[index] = key, [DeviceCopies(fitting)] if fitting else [], rest
        _, launches, rest = self._copies[index]
        for launch in launches:
            launch.launch()
        _copy_each(rest)

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the bucket brought last."""
        yield from self._bucket.items()

    def release(self) -> None:
        """Keep the mappings for the next update."""
        self._bucket = {}

    def close(self) -> None:
        """Unmap the memory, and free this rank's own."""
        self._bucket, self._copies, self._known = {}, {}, None
        self._close_readers()
        self._ranks = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _close_readers(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.close()


def _copy_each(copies: Iterable[DeviceCopy]) -> None:
    for copy in copies:
        assert copy.destination is not None
        copy.destination.copy_(copy.source)


def _require_whole(plan: WeightPlan, ranks: Sequence[Sequence[FlatPart]], sources: int) -> None:
    """Check that every element of the plan's tensors is in exactly one part.

    Raises:
        InvalidRequest: a tensor has gaps or is held twice, or a part lies outside of it or out of order.
    """
    if len(ranks) != sources:
        raise InvalidRequest(
            f"the source has the memory of {sources} ranks, and the parts of {len(ranks)}", field="source.parts"
        )
    specs = plan.tensors
    parts: list[list[FlatPart]] = [[] for _ in specs]
    for rank in ranks:
        if [part.tensor for part in rank] != sorted(part.tensor for part in rank):
            raise InvalidRequest("a rank's parts are not in the plan's order", field="source.parts")
        for part in rank:
            if not 0 <= part.tensor < len(specs):
                raise InvalidRequest(
                    f"a part is of tensor {part.tensor} of a plan of {len(specs)}", field="source.parts"
                )
            parts[part.tensor].append(part)
    for spec, pieces in zip(specs, parts, strict=True):
        reached = 0
        for part in sorted(pieces):
            if part.begin != reached or part.numel < 0:
                break
            reached += part.numel
        numel = torch.empty(spec.shape, dtype=dtype_of(spec), device="meta").numel()
        if reached != numel or not pieces:
            held = ", ".join(f"{part.begin} to {part.begin + part.numel}" for part in sorted(pieces)[:4])
            raise InvalidRequest(
                f"the ranks' parts of {spec.name} ({list(spec.shape)}) do not make up its {numel} elements: {held}",
                field="source.parts",
            )
