"""The two ends of a transport."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.types.weights import PlacedTensor, WeightManifest, WeightPlan, WeightSource, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import ALIGNMENT
from drivetrain_weight_sync.tensors.dtypes import as_bits, dtype_of

_NONE: Final[Mapping[str, torch.Tensor]] = {}


class Sender(ABC):
    """The trainer's end: takes the tensors of one push at a time. Used by one thread at a time."""

    copies = True
    """Whether :meth:`put` copies a held tensor of the plan's dtype; else it only notes it."""
    keeps = False
    """Whether a tensor that was put need not be put at the next push of the plan, if it lies where it did."""

    @abstractmethod
    def begin(self, plan: WeightPlan) -> None:
        """Make ready to take every tensor of ``plan``. An earlier push, finished or not, is forgotten."""

    @abstractmethod
    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Take one tensor of the plan, in its shape, converting its dtype if it has another.

        ``held`` says that the tensor stays as it is until the push is over; else its memory may change after this.
        """

    def slots(self) -> Mapping[str, torch.Tensor]:
        """Where :meth:`put` copies each tensor of the plan to, by name; another may make the copy as well."""
        return _NONE

    @abstractmethod
    def source(self) -> WeightSource:
        """Say where the tensors lie, now that all were put."""

    def committed(self, digests: Mapping[str, int]) -> None:  # noqa: B027  # not all have something to do
        """The engine serves what was put, whose digests these are, by name."""

    def put_whole(self) -> None:
        """What was put changes weights that the engine does not hold: bring every tensor whole, as :meth:`source` says.

        Raises:
            WeightSyncError: this transport does so already.
        """
        raise WeightSyncError(f"a {type(self).__name__} brings every tensor whole already; its reader named a base")

    def forget(self) -> None:  # noqa: B027
        """What the engine holds, or how far it is, is not known any more. Safe from any thread."""

    @property
    def sent_nbytes(self) -> int | None:
        """Bytes that had to travel for the push; None: those of all tensors."""
        return None

    def release(self) -> None:  # noqa: B027
        """The push is over, well or not: let go of what only it needed. What keeps all for the next has none."""

    def close(self) -> None:
        """Leave nothing behind."""
        self.release()


@dataclass(frozen=True, slots=True)
class Patch:
    """What is new of a tensor: ``values[i]`` goes to ``positions[i]`` of the flattened one."""

    positions: torch.Tensor
    """int64 ``[n]``."""
    values: torch.Tensor
    """``[n]``, of the tensor's dtype."""

    def apply(self, tensor: torch.Tensor) -> None:
        """Write the new values into a contiguous tensor."""
        device = tensor.device
        as_bits(tensor).view(-1)[self.positions.to(device)] = as_bits(self.values).to(device)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a source turned out to hold."""

    plan: WeightPlan
    digests: Mapping[str, int]
    base: str | None = None
    """``hash_of`` the digests of the weights that it changes; None: it holds every tensor whole."""


class Reader(ABC):
    """The engine's end: reads the source of one update at a time, in the engine's own thread but for :meth:`open`."""

    @property
    def place(self) -> Hashable:
        """Where the tensors lie, if what is launched on a GPU while they are there finds them as they are; else None.

        Two updates of one plan, or two buckets of one number, and one place bring tensors at the same addresses.
        """
        return None

    @property
    def takes_long(self) -> bool:
        """Whether :meth:`open` reads tensors: it is then called in a thread of its own, while the engine generates."""
        return False

    @abstractmethod
    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Find the source and look at it; all that can be refused is refused here.

        Raises:
            InvalidRequest: it is not there, or is not what the request says.
        """

    def bring(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Bring these buckets of the plan; yield which of them are there, until the next are asked for."""
        yield indices

    @abstractmethod
    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor | Patch]]:
        """Yield bucket ``index`` of the plan, which was brought.

        A tensor is valid until the next one is asked for, but see ``place``.

        With a base, tensors that are as they were may be left out, and a :class:`Patch` stand for one that is not.
        """

    @abstractmethod
    def release(self) -> None:
        """The update is over, well or not: let go of what only it needed."""

    def close(self) -> None:
        """Let go of everything."""
        self.release()


def hash_of(digests: Mapping[str, int]) -> str:
    """Name weights by the digests of all their tensors."""
    lines = (f"{name}={digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def slot(memory: torch.Tensor, bucket_offset: int, placed: PlacedTensor) -> torch.Tensor:
    """The tensor that lies in its place of a bucket, which begins ``bucket_offset`` bytes into ``memory`` (uint8)."""
    begin = bucket_offset + placed.offset
    return memory[begin : begin + placed.nbytes].view(dtype_of(placed.spec)).view(placed.spec.shape)


def check_fit(bucket_offsets: Sequence[int], nbytes: int, plan: WeightPlan) -> None:
    """Check that the buckets of ``plan`` lie within an arena of ``nbytes``.

    Raises:
        InvalidRequest: one does not.
    """
    if len(bucket_offsets) != len(plan.buckets):
        raise InvalidRequest(
            f"bucket_offsets has {len(bucket_offsets)} entries for a plan of {len(plan.buckets)} buckets",
            field="source.bucket_offsets",
        )
    for index, (offset, bucket) in enumerate(zip(bucket_offsets, plan.buckets, strict=True)):
        if offset < 0 or offset % ALIGNMENT or offset + bucket.nbytes > nbytes:
            raise InvalidRequest(
                f"bucket {index} ({bucket.nbytes} bytes) is said to begin at byte {offset} of an arena of "
                f"{nbytes}; it must lie within, at a multiple of {ALIGNMENT}",
                field="source.bucket_offsets",
            )
