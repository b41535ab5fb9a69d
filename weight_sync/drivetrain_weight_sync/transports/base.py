"""Interfaces of a transport: the trainer's ``Sender`` and the engine's ``Reader``."""

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
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.dtypes import as_bits, dtype_of
from drivetrain_weight_sync.transports.updatable_engine import AdaptableEngine, UpdatableEngine, UpdateUnderWay

_NONE: Final[Mapping[str, torch.Tensor]] = {}


class Sender(ABC):
    """The trainer's end: takes the tensors of one push at a time. Used by one thread at a time.

    A push calls :meth:`begin`, :meth:`put` or :meth:`put_derived` for each tensor, :meth:`source` and :meth:`connect`.
    The engine prepares the update while it keeps serving, :meth:`apply` has the engine apply it, and :meth:`release`
    ends the push. The coroutines run in the trainer's event loop.
    """

    copies = True
    """True if :meth:`put` copies a held tensor of the plan's dtype; false if it keeps a reference."""
    keeps = False
    """True if a held tensor that has not moved need not be put again at the next push of the same plan."""
    lends = False
    """True if a prepared engine refers to the trainer's own tensors: if the push is given up, the engine drops them."""
    release_blocks = True
    """True if :meth:`release` may take long and must run in a thread; false if at most it drops references."""

    @abstractmethod
    def begin(self, plan: WeightPlan) -> None:
        """Get ready to take every tensor of ``plan``. An earlier push, finished or not, is forgotten."""

    @abstractmethod
    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Take one tensor of the plan, in its shape, converting its dtype to the plan's.

        If ``held``, the tensor keeps its values until the push is over. Otherwise its memory may change after this
        returns.
        """

    def put_derived(self, name: str, tensor: torch.Tensor, derived: DerivedTensor) -> None:
        """Take one tensor of the plan that is computed from others, such as a layer with an adapter merged into it.

        Nothing else writes to ``tensor``. A sender that would keep it until the push is over keeps ``derived`` instead,
        and computes the tensor again when it is sent.
        """
        self.put(name, tensor, held=True)

    def slots(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers into which :meth:`put` copies, by name, so that a copy kernel can fill them instead."""
        return _NONE

    @abstractmethod
    def source(self) -> WeightSource:
        """Describe where the tensors are, once all were put."""

    async def connect(self, engine: UpdatableEngine) -> None:  # noqa: B027
        """Let the engine reach the source, before it prepares the update. Most sources need no connection."""

    async def disconnect(self, engine: UpdatableEngine) -> None:  # noqa: B027
        """End the connection that :meth:`connect` made."""

    async def apply(self, engine: UpdatableEngine, request: WeightUpdateRequest) -> UpdateUnderWay:
        """Have the engine apply a prepared update; return the update once it is committed.

        Transports that send the tensors meanwhile override this.
        """
        async with engine.weight_update(request, at_once=True) as update:
            pass
        return update

    async def apply_adapter(self, engine: AdaptableEngine, request: WeightUpdateRequest) -> None:
        """Have the engine load an adapter whose tensors were put, and serve it.

        Transports that send the tensors meanwhile override this.
        """
        await engine.update_named_weights(request)

    def committed(self, digests: Mapping[str, int]) -> None:  # noqa: B027  # not all have something to do
        """Record that the engine now serves the tensors that were put; ``digests`` are theirs, by name."""

    def put_whole(self) -> None:
        """Stage every tensor whole, because the engine does not hold the base of the delta; call :meth:`source` again.

        Raises:
            WeightSyncError: this transport always sends tensors whole.
        """
        raise WeightSyncError(f"{type(self).__name__} always sends tensors whole, but its reader reported a base")

    def forget(self) -> None:  # noqa: B027
        """Drop all assumptions about the engine's weights and progress. Safe from any thread."""

    @property
    def sent_nbytes(self) -> int | None:
        """Bytes sent for the push; None if every tensor is sent whole."""
        return None

    def release(self) -> None:  # noqa: B027
        """Free the state of an ended push, successful or not. Senders that keep buffers need not override this."""

    def close(self) -> None:
        """Free everything."""
        self.release()


@dataclass(frozen=True, slots=True)
class Patch:
    """Changed elements of a tensor: ``values[i]`` goes to ``positions[i]`` of the flattened tensor."""

    positions: torch.Tensor
    """int64 ``[n]``."""
    values: torch.Tensor
    """``[n]``, in the tensor's dtype."""

    def apply(self, tensor: torch.Tensor) -> None:
        """Write the new values into a contiguous tensor."""
        device = tensor.device
        as_bits(tensor).view(-1)[self.positions.to(device)] = as_bits(self.values).to(device)


@dataclass(frozen=True, slots=True)
class Opened:
    """The contents of an opened source."""

    plan: WeightPlan
    digests: Mapping[str, int]
    base: str | None = None
    """``hash_of`` the digests of the weights that a delta changes; None if every tensor is whole."""


class Reader(ABC):
    """The engine's end: reads the source of one update at a time. Only :meth:`open` may run in another thread."""

    @property
    def place(self) -> Hashable:
        """Stable-address key: a cached GPU launch may be reused while it is unchanged; None: addresses vary.

        Two updates of one plan, or two buckets of one number, with the same key bring tensors at the same addresses.
        """
        return None

    @property
    def has_place(self) -> bool:
        """True if :attr:`place` is set while buckets are loaded; known once the source is open."""
        return self.place is not None

    @property
    def holds(self) -> bool:
        """True if every tensor of an open source stays valid until the source is released."""
        return False

    @property
    def takes_long(self) -> bool:
        """True if :meth:`open` reads tensors; it then runs in a separate thread, while the engine keeps generating."""
        return False

    @abstractmethod
    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Find and check the source. Everything that can be refused is refused here.

        Raises:
            InvalidRequest: the source does not exist, or differs from the request's description.
        """

    def bring(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Fetch these buckets of the plan; yield groups of indices, each available until the next is asked for."""
        yield indices

    @abstractmethod
    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor | Patch]]:
        """Yield the tensors of bucket ``index``, which :meth:`bring` made available.

        A tensor is valid until the next one is read, unless :attr:`place` is set. A source with a base may leave out
        unchanged tensors, and yield a :class:`Patch` for changed ones.
        """

    @abstractmethod
    def release(self) -> None:
        """Free the state of an ended update, successful or not."""

    def close(self) -> None:
        """Free everything."""
        self.release()


def hash_of(digests: Mapping[str, int]) -> str:
    """Return a name for weights, made from the digests of all their tensors."""
    lines = (f"{name}={digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def slot(memory: torch.Tensor, bucket_offset: int, placed: PlacedTensor) -> torch.Tensor:
    """Return a view of a tensor in its bucket, which begins ``bucket_offset`` bytes into ``memory`` (uint8)."""
    begin = bucket_offset + placed.offset
    return memory[begin : begin + placed.nbytes].view(dtype_of(placed.spec)).view(placed.spec.shape)


class Slots:
    """Makes views of tensors in ``memory`` (uint8), each in one step: :func:`slot` takes three."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._typed: dict[str, tuple[torch.Tensor, int, int]] = {}
        """The memory as a tensor of each dtype, the size of an element, and the storage offset."""

    def view(self, bucket_offset: int, placed: PlacedTensor) -> torch.Tensor:
        """Return a view of a tensor in its bucket, which begins ``bucket_offset`` bytes into the memory."""
        spec = placed.spec
        typed = self._typed.get(spec.dtype)
        if typed is None:
            dtype = dtype_of(spec)
            whole = self._memory[: len(self._memory) // dtype.itemsize * dtype.itemsize].view(dtype)
            typed = self._typed[spec.dtype] = whole, dtype.itemsize, int(whole.storage_offset())
        whole, itemsize, offset = typed
        strides, step = [], 1
        for size in reversed(spec.shape):
            strides.append(step)
            step *= size
        return whole.as_strided(spec.shape, strides[::-1], offset + (bucket_offset + placed.offset) // itemsize)


def check_fit(bucket_offsets: Sequence[int], nbytes: int, plan: WeightPlan) -> None:
    """Check that the buckets of ``plan`` lie within an arena of ``nbytes``.

    Raises:
        InvalidRequest: a bucket lies outside, or is not aligned.
    """
    if len(bucket_offsets) != len(plan.buckets):
        raise InvalidRequest(
            f"bucket_offsets has {len(bucket_offsets)} entries for a plan of {len(plan.buckets)} buckets",
            field="source.bucket_offsets",
        )
    for index, (offset, bucket) in enumerate(zip(bucket_offsets, plan.buckets, strict=True)):
        if offset < 0 or offset % ALIGNMENT or offset + bucket.nbytes > nbytes:
            raise InvalidRequest(
                f"the source places bucket {index} ({bucket.nbytes} bytes) at byte {offset} of an arena of "
                f"{nbytes}; it must lie within, at a multiple of {ALIGNMENT}",
                field="source.bucket_offsets",
            )
