"""Broadcast transport: buckets are packed, sent, received and loaded while others are under way."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard, TypeVar

import torch

from drivetrain.errors import DrivetrainError, EngineDied, InvalidRequest, MemberLost, WeightTransferFailed
from drivetrain.types.weights import (
    BroadcastSource,
    CommunicatorSpec,
    TensorSpec,
    WeightManifest,
    WeightPlan,
    WeightUpdateRequest,
)
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender, slot
from drivetrain_weight_sync.transports.device_memory import uuid_of
from drivetrain_weight_sync.transports.process_groups import Broadcast, Group, GroupBackend, Groups, meeting_place
from drivetrain_weight_sync.transports.threads import in_thread
from drivetrain_weight_sync.transports.updatable_engine import AdaptableEngine, UpdatableEngine, UpdateUnderWay

_BUFFERS: Final = 2
"""Buffers for buckets: one is packed or loaded while another is under way."""
_BYTES_PER_CALL: Final[Mapping[GroupBackend, int]] = {"gloo": 1 << 30, "nccl": 16 << 30}
"""Most bytes that the engine receives in one call. Each call has a deadline; a pause between two calls costs time."""
_GRACE_S: Final = 5.0
"""Seconds that a broken broadcast waits for the engine's own error, which names the cause."""
_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def require_own_gpu(own: str, engines: Sequence[str]) -> None:
    """Refuse an NCCL group in which a rank of the engine is on the trainer's GPU.

    Args:
        own: UUID of the trainer's GPU.
        engines: UUIDs of the GPUs that the engine reports.

    Raises:
        InvalidRequest: NCCL could not form the group.
    """
    if own in engines:
        raise InvalidRequest(
            f"group_backend='nccl' takes one rank of each GPU, and {own} holds the trainer's weights and a rank of the "
            "engine; use strategy 'cuda_ipc', or put trainer and engine on different GPUs",
            field="group_backend",
        )


class BroadcastSender(Sender):
    """Rank 0. Packs a bucket while the previous one is broadcast; a push holds two buckets in memory.

    Args:
        device: The device on which buckets are packed; a GPU for NCCL.
        backend: The library that sends.
        address: Address at which the engine's ranks reach this host.
    """

    copies = False
    release_blocks = False

    def __init__(self, device: torch.device, backend: GroupBackend, address: str) -> None:
        self._device = device
        self._backend: GroupBackend = backend
        self._address = address
        self._name = _new_name()
        """Name of the group, formed or not."""
        self._engines_group: str | None = None
        """Name of the group that the engine joined last; None once the engine was told to leave it."""
        self._group: Group | None = None
        self._ranks: tuple[str, ...] = ()
        """Names of the engine's ranks in the group."""
        self._abandoned = threading.Event()
        self._plan = WeightPlan(())
        self._specs: dict[str, TensorSpec] = {}
        self._tensors: dict[str, torch.Tensor | DerivedTensor] = {}
        self._buffers = Buffers()

    def offer(self, ranks: int, timeout: float) -> tuple[CommunicatorSpec, Any]:
        """Create a store, through which the trainer and ``ranks`` workers can form a group."""
        store = meeting_place(self._address, 1 + ranks, timeout)
        return CommunicatorSpec(
            master_address=self._address,
            master_port=store.port,
            rank_offset=1,
            world_size=1 + ranks,
            group_name=self._name,
            backend=self._backend,
            timeout=timeout,
        ), store

    def join(self, spec: CommunicatorSpec, store: Any) -> None:
        """Form the group; the engine must be told to join at the same time."""
        self._abandoned.clear()
        self._group = Group(spec, 0, self._device, store, self._abandoned)

    def leave(self) -> None:
        """Leave the group, even while it forms or a broadcast is under way. Safe from any thread."""
        self._abandoned.set()
        self._name = _new_name()
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    async def connect(self, engine: UpdatableEngine) -> None:
        """Form a process group with the engine, unless that of the last push still exists and holds all its ranks."""
        ranks = tuple(engine.weight_update_ranks)
        if self._group is not None and self._ranks == ranks:
            return
        if self._backend == "nccl":
            require_own_gpu(uuid_of(self._device), engine.gpus)
        await self.disconnect(engine)
        name = self._name  # the staged update names this group
        self.leave()
        self._name, self._ranks = name, ranks
        spec, store = self.offer(len(ranks), engine.config.timeouts.weight_update)
        joining = asyncio.ensure_future(in_thread(lambda: self.join(spec, store)))
        engines = asyncio.ensure_future(engine.init_weight_update_communicator(spec))
        try:
            await asyncio.gather(joining, engines)
        except BaseException:
            self.leave()
            engines.cancel()
            await asyncio.gather(joining, engines, return_exceptions=True)
            self.leave()  # the group may have formed in the meantime
            raise
        self._engines_group = spec.group_name

    async def disconnect(self, engine: UpdatableEngine) -> None:
        """Make the engine leave the process group of earlier pushes."""
        name, self._engines_group = self._engines_group, None
        if name is not None:
            try:
                await engine.destroy_weight_update_communicator(name)
            except DrivetrainError as error:
                # An engine that is closed or dead has left every group.
                _logger.info("the engine did not leave the group %s: %s", name, error)

    def forget(self) -> None:
        """Leave the group: its ranks may be at different broadcasts."""
        self.leave()

    def begin(self, plan: WeightPlan) -> None:
        """Forget earlier tensors."""
        self.release()
        self._plan = plan
        self._specs = {spec.name: spec for spec in plan.tensors}

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Keep the tensor, or a copy if it is streamed."""
        self._tensors[name] = tensor if held else tensor.to(dtype_of(self._specs[name]), copy=True)

    def put_derived(self, name: str, tensor: torch.Tensor, derived: DerivedTensor) -> None:
        """Remember how to compute the tensor; it is computed when its bucket is packed."""
        self._tensors[name] = derived

    def source(self) -> BroadcastSource:
        """Return a source that names the group, which :meth:`connect` forms."""
        return BroadcastSource(group_name=self._name)

    async def apply(self, engine: UpdatableEngine, request: WeightUpdateRequest) -> UpdateUnderWay:
        """Send the buckets while the engine applies the update; if either fails, cancel the other."""
        calls = list(split_into_calls(self._plan, _BYTES_PER_CALL[self._backend]))
        at_once = len(calls) <= 1
        begun = asyncio.Event()

        async def send() -> None:
            await begun.wait()
            await in_thread(lambda: self.send(range(len(self._plan.buckets))))

        async def receive() -> UpdateUnderWay:
            async with engine.weight_update(request, at_once=at_once) as update:
                begun.set()
                if not at_once:
                    for indices in calls:
                        await update.load(indices)
            return update

        return await self._both(send(), receive())

    async def apply_adapter(self, engine: AdaptableEngine, request: WeightUpdateRequest) -> None:
        """Send the buckets while the engine loads the adapter; if either fails, cancel the other."""
        send = in_thread(lambda: self.send(range(len(self._plan.buckets))))
        await self._both(send, engine.update_named_weights(request))

    async def _both(self, send: Awaitable[None], receive: Awaitable[_T]) -> _T:
        """Send while the engine receives; return the engine's result."""
        sending, receiving = asyncio.ensure_future(send), asyncio.ensure_future(receive)
        try:
            done, _ = await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_EXCEPTION)
            for half in done:
                half.result()
        except BaseException as error:
            self.leave()
            if isinstance(error, Exception):
                # A broadcast breaks before the engine's death is known, and that death is the error to raise.
                await asyncio.wait([receiving], timeout=_GRACE_S)
                if receiving.done() and not receiving.cancelled() and receiving.exception() is None:
                    return receiving.result()  # a fleet has committed without the engine that broke the broadcast
            sending.cancel()
            receiving.cancel()
            _, of_engine = await asyncio.gather(sending, receiving, return_exceptions=True)
            if isinstance(of_engine, EngineDied) or _names_the_lost(of_engine):
                raise of_engine from error
            raise
        return receiving.result()

    def send(self, indices: Sequence[int]) -> None:
        """Broadcast these buckets, one after another."""
        group = self._group
        if group is None:
            raise WeightTransferFailed("the trainer left the group; push again")
        under_way: deque[Broadcast] = deque()
        self._buffers.begin()
        for bucket in (self._plan.buckets[index] for index in indices):
            if len(under_way) == _BUFFERS:
                under_way.popleft().precede()
            packed = self._buffers.next(bucket.nbytes, group.device)
            slots = [slot(packed, 0, placed) for placed in bucket.tensors]
            torch._foreach_copy_(slots, [self._computed(placed.spec.name) for placed in bucket.tensors])  # pyright: ignore
            under_way.append(group.start(packed))
        for broadcast in under_way:
            broadcast.wait()

    def _computed(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor.compute() if isinstance(tensor, DerivedTensor) else tensor

    def release(self) -> None:
        """Drop every reference to the tensors; the buckets' memory is kept."""
        self._tensors = {}

    def close(self) -> None:
        """Leave the group."""
        self.release()
        if self._group is not None:
            self._group.keep(self._buffers)
        self.leave()
        self._buffers = Buffers()


class BroadcastReader(Reader):
    """A later rank. Receives a bucket while the previous one is loaded, in memory for two."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._group: Group | None = None
        self._plan = WeightPlan(())
        self.buffers = Buffers()
        """Memory that receives buckets."""
        self._to_come: deque[int] = deque()
        self._under_way: deque[tuple[int, torch.Tensor, Broadcast]] = deque()
        self._received = torch.empty(0, dtype=torch.uint8)

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Find the group."""
        assert isinstance(request.source, BroadcastSource)
        assert request.plan is not None
        assert request.digests is not None
        self._group, self._plan = self._groups.get(request.source.group_name), request.plan
        return Opened(request.plan, request.digests)

    @property
    def place(self) -> Hashable:
        """Address of the bucket received last, if on a GPU: work launched on it runs before the buffer is reused."""
        return self._received.data_ptr() if self._received.is_cuda else None

    @property
    def has_place(self) -> bool:
        """True if buckets are received on a GPU."""
        return self._group is not None and self._group.device.type == "cuda"

    def bring(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Receive the buckets, one after another."""
        self.buffers.begin()
        self._to_come = deque(indices)
        self._receive_next()
        while self._under_way:
            index, self._received, broadcast = self._under_way[0]
            self._receive_next()  # ordered after the work launched on the previous bucket in that memory
            broadcast.precede()
            yield [index]
            if len(self._under_way) == 1:
                # Wait for the broadcasts before anything waits for launched work, as the trainer may be gone.
                broadcast.wait()
            self._under_way.popleft()

    def _receive_next(self) -> None:
        if self._to_come:
            assert self._group is not None
            index = self._to_come.popleft()
            received = self.buffers.next(self._plan.buckets[index].nbytes, self._group.device)
            self._under_way.append((index, received, self._group.start(received)))

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the bucket received last."""
        for placed in self._plan.buckets[index].tensors:
            yield placed.spec.name, slot(self._received, 0, placed)

    def release(self) -> None:
        """Keep group and memory for the next update, unless an unfinished broadcast may still write to the memory."""
        if self._under_way and self._group is not None:
            self._group.keep((list(self._under_way), self.buffers))
            self._under_way.clear()
            self.buffers = Buffers()
        self._group = None
        self._received = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Free the memory."""
        self.release()
        self.buffers = Buffers()


class Buffers:
    """Buffers for buckets, used in turn."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._next = 0

    def begin(self) -> None:
        """Start again with the first buffer, so that each bucket has the same memory in every update."""
        self._next = 0

    def next(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the least recently used buffer, uint8 ``[nbytes]``."""
        turn, self._next = self._next, (self._next + 1) % _BUFFERS
        if len(self._buffers[turn]) < nbytes or self._buffers[turn].device != device:
            self._buffers[turn] = _buffer(nbytes, device)
        return self._buffers[turn][:nbytes]


def split_into_calls(plan: WeightPlan, most: int) -> Iterator[list[int]]:
    """Group bucket indices into calls of at most ``most`` bytes; a larger bucket gets a call of its own."""
    indices: list[int] = []
    nbytes = 0
    for index, bucket in enumerate(plan.buckets):
        if indices and nbytes + bucket.nbytes > most:
            yield indices
            indices, nbytes = [], 0
        indices.append(index)
        nbytes += bucket.nbytes
    if indices:
        yield indices


def _names_the_lost(error: object) -> TypeGuard[Exception]:
    """Return True for an error that a fleet raised because it lost an engine."""
    return isinstance(error, MemberLost) or (isinstance(error, Exception) and isinstance(error.__cause__, MemberLost))


def _new_name() -> str:
    return f"drivetrain-{uuid.uuid4().hex[:12]}"


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device, pin_memory=pinned)
