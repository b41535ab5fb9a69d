"""Weight primitives of the ``Backend`` page for one rank of an engine, run in the process that holds the weights."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from drivetrain.errors import EngineStateError
from drivetrain.process.worker_calls import FailedElsewhere
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import (
    ApplyUpdate,
    BeginUpdate,
    BroadcastSource,
    CommitUpdate,
    CommunicatorSpec,
    PrepareUpdate,
    TensorData,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
    WeightUpdateRequest,
)
from drivetrain_weight_sync.copying import device_copies
from drivetrain_weight_sync.receiver.checkpoint_comparison import require_as_stored, require_converted_alike
from drivetrain_weight_sync.receiver.lora_adapters import AdapterChecks
from drivetrain_weight_sync.receiver.plain_adapters import plain_tensors
from drivetrain_weight_sync.receiver.received_adapters import receive_adapter
from drivetrain_weight_sync.receiver.receiver import Receiver
from drivetrain_weight_sync.receiver.saving import WeightWriter
from drivetrain_weight_sync.receiver.sleeping_memory import SleepingMemory, falling_asleep, waking_up
from drivetrain_weight_sync.receiver.weight_inspection import merged, require_tensor, tensor_data, validate_weights
from drivetrain_weight_sync.tracing.derived_tensors import AfterLoading, Derived, casts_of_weights
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts
from drivetrain_weight_sync.tracing.traced_target import TracedTarget
from drivetrain_weight_sync.transports.device_memory import uuid_of
from drivetrain_weight_sync.transports.process_groups import Groups

_T = TypeVar("_T")


@dataclass(slots=True)
class HeldAdapter:
    """An adapter in this process's memory."""

    config: dict[str, object]
    """Fields of ``adapter_config.json``."""
    tensors: dict[str, torch.Tensor]
    """As they came. An engine that loads them may write to them: vLLM multiplies B by the scale."""
    loaded: Any = None
    """The engine's own object, once it has loaded the tensors: it is to be used again, and not made of them again."""

    def described(self) -> dict[str, object]:
        """Return the shape, dtype and device of each tensor: adapters that agree in them differ in values alone."""
        return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in self.tensors.items()}


class RankWeights(ABC):
    """Base of an engine's worker. Methods have the names and meanings of those on the ``Backend`` page.

    A subclass provides the model, the checkpoint's manifest, and the group of the other ranks.
    """

    def __init__(self) -> None:
        self.asleep: set[MemoryTag] = set()
        """Tags whose memory was given back by sleep."""
        self.adapters: dict[str, HeldAdapter] = {}
        """Adapters that came as tensors, by the path that the engine has for them."""
        self._checks = AdapterChecks()
        self.committed: str | None = None
        """Version of the last update that this rank committed."""

    def rank_state(self) -> str:
        """Describe what every rank must have in common after a call: the memory that sleeps, and the weights."""
        asleep = ", ".join(sorted(tag.value for tag in self.asleep))
        weights = "the first weights" if self.committed is None else f"the weights {self.committed!r}"
        return f"{weights}, asleep: {asleep or 'nothing'}"

    @property
    @abstractmethod
    def model(self) -> torch.nn.Module:
        """The engine's model."""

    @property
    @abstractmethod
    def checkpoint(self) -> WeightManifest:
        """Manifest of the model's checkpoint tensors, as a trainer has them."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """Folder from which the engine read its weights; None for dummy weights or a model that is no local folder."""

    @property
    @abstractmethod
    def group(self) -> Any:
        """Process group, on the CPU, of the ranks that take each call together; None if there is one rank."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this rank among all ranks that hold weights."""

    @cached_property
    def target(self) -> TracedTarget:
        """The model's tensors by checkpoint name. First accessed before any update, and while the weights are awake.

        All ranks access it first in the same call, and not within :meth:`of_ranks`.

        Raises:
            WeightSyncError: the engine's weight loader cannot be traced.
        """
        recorded: list[TracedTarget] = []

        def record() -> WeightManifest:
            recorded.append(
                TracedTarget(
                    self.load_weights,
                    self.checkpoint,
                    split=self.group is not None,
                    at_once=device_copies.is_available(),
                    converted=self.converted(),
                    model=self.model,
                )
            )
            return recorded[0].manifest()

        manifests = self.of_ranks(record)
        (target,) = recorded
        target.share_with(manifests)
        if self.folder is not None:
            require_as_stored(target, self.folder)
            require_converted_alike(target, self.folder)
        steps = [*self.after_loading(), *casts_of_weights(self.model)]
        target.derived = Derived(steps, target.storages, self.cache(), target.converter)
        return target

    def _have_receiver(self) -> None:
        """Create the receiver while all ranks take part, before a failure on one rank can leave the others waiting."""
        if "receiver" not in self.__dict__:
            self.of_ranks(self.require_weights)
            _ = self.receiver

    def after_loading(self) -> Iterable[AfterLoading]:
        """Return steps that the engine takes after loading, module by module."""
        return ()

    def cache(self) -> Iterable[torch.UntypedStorage]:
        """Return the storages of the KV cache that modules of the model hold."""
        return ()

    def converted(self) -> QuantisedParts | None:
        """Return the parts that the engine quantises or repacks after loading; None if there are none."""
        return None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors as the engine loads a checkpoint."""
        return self.model.load_weights(weights)  # type: ignore[operator]

    @cached_property
    def receiver(self) -> Receiver:
        """The receiving end of weight updates."""
        return Receiver(self.target)

    @cached_property
    def writer(self) -> WeightWriter:
        """Writer that saves weights in a thread beside the engine's own."""
        return WeightWriter(self.target)

    def require_weights(self) -> None:
        """Raise :class:`EngineStateError` if the weights are asleep."""
        if MemoryTag.WEIGHTS in self.asleep:
            raise EngineStateError(
                "the memory of the weights was given back by sleep; call wake_up(tags=[MemoryTag.WEIGHTS]) first",
                state="asleep",
            )

    def put_to_sleep(self, memory: SleepingMemory, tags: frozenset[MemoryTag]) -> None:
        """Free memory on all ranks, once all have copied what must be kept; if one cannot, none frees any.

        Raises:
            EngineOutOfMemory: A rank found no memory for its copies; all ranks are awake.
        """
        with falling_asleep():
            self.of_ranks(lambda: memory.keep(tags))
        memory.free(tags)
        self.asleep |= tags

    def awaken(self, memory: SleepingMemory, tags: frozenset[MemoryTag]) -> None:
        """Allocate memory again on all ranks; if one cannot, all sleep on.

        Raises:
            EngineOutOfMemory: A rank found no memory; all ranks are asleep.
        """
        try:
            with waking_up():
                self.of_ranks(lambda: memory.wake_up(tags))
        except FailedElsewhere:
            memory.free(tags & self.asleep)  # memory that was awake before stays so, as on the other rank
            raise
        self.asleep -= tags

    def gpus(self) -> list[str]:
        """Return UUIDs of the GPUs that hold the weights, by rank; empty on a CPU."""
        device = next(self.model.parameters()).device
        return self.of_ranks(lambda: uuid_of(device)) if device.type == "cuda" else []

    def weight_manifest(self) -> WeightManifest:
        """Return the model's tensors by their checkpoint names."""
        return self.target.manifest()

    def prepare_weights(self, message: PrepareUpdate) -> WeightReply | None:
        """Prepare an update; return None while its source is being opened, then poll :meth:`prepared_weights`."""
        self._have_receiver()

        def prepare() -> WeightReply | None:
            self.require_weights()
            self.receiver.prepare(message)
            return self.receiver.prepared()

        return self._once_all_have(prepare)

    def prepared_weights(self) -> WeightReply | None:
        """Return the reply to the last PrepareUpdate, or None while any rank is still opening its source."""
        return self._once_all_have(lambda: self.receiver.prepared())

    def _once_all_have(self, reply: Callable[[], WeightReply | None]) -> WeightReply | None:
        replies = self.of_ranks(reply)
        return None if None in replies else replies[self.rank]

    def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update other than PrepareUpdate."""
        if isinstance(message, BeginUpdate):
            self.writer.stop()
        reply = self.receiver.handle(message)
        if isinstance(message, CommitUpdate):
            self.committed = message.version
        return reply

    def begin_weights(self, update: ApplyUpdate) -> WeightReply:
        """Begin a prepared update and load every bucket; on a GPU the copies continue after this returns."""
        self.receive_weights(BeginUpdate())
        return self.receive_weights(update.load)

    def commit_weights(self, update: ApplyUpdate) -> WeightReply:
        """Verify the loaded weights, then commit; no rank commits unless every rank verified."""
        self.of_ranks(lambda: self.receive_weights(VerifyUpdate()))
        return self.receive_weights(CommitUpdate(update.version))

    @abstractmethod
    def load_held_adapters(self) -> None:
        """Have the engine load adapters whose path is among :attr:`adapters` from there; called before each."""

    def stage_adapter(
        self,
        path: str,
        update: WeightUpdateRequest,
        largest_rank: int,
        adapted_with: dict[str, list[str]],
        namings: list[dict[str, tuple[int, ...]]],
    ) -> None:
        """Receive and check an adapter; every rank holds it under ``path``, or none does.

        Args:
            path: Name by which the engine asks for it, in place of a folder.
            update: The update that brings it.
            largest_rank: As for ``PlainAdapters``.
            adapted_with: As for ``PlainAdapters``.
            namings: As for ``PlainAdapters.folder_for``.
        """
        self.load_held_adapters()
        groups = self.receiver.groups if isinstance(update.source, BroadcastSource) else Groups()

        def receive() -> None:
            given = receive_adapter(update, groups)
            config, tensors = plain_tensors(given, largest_rank, adapted_with, namings, self._checks)
            self.adapters[path] = HeldAdapter(config, tensors)

        try:
            self.of_ranks(receive)
        except BaseException:
            self.drop_adapter(path)
            raise

    def drop_adapter(self, path: str) -> None:
        """Free an adapter that the engine does not have loaded."""
        self.adapters.pop(path, None)

    def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a group in which a trainer broadcasts; raises EngineBusy while it forms: call again."""
        device = next(self.model.parameters()).device
        self.receiver.groups.join_behind(spec, spec.rank_offset + self.rank, device)

    def destroy_communicator(self, group_name: str) -> None:
        """Leave the group."""
        self.receiver.groups.leave(group_name)

    def read_weight(self, name: str) -> TensorData:
        """Return a copy of one tensor."""
        self.require_weights()
        target = self.target
        require_tensor(target, name)
        if self.group is None:
            return tensor_data(name, target.read(name))
        pieces = itertools.chain.from_iterable(self.of_ranks(lambda: target.pieces(name)))
        return tensor_data(name, target.assembled(name, pieces))

    def validate_weights(self) -> WeightReport:
        """Check every tensor in place for NaN, infinity, and nothing but zeros."""
        self._have_receiver()

        def validate() -> WeightReport:
            self.require_weights()
            return validate_weights(self.target)

        return merged(self.of_ranks(validate))

    def save_sharded(self, path: str) -> None:
        """Write the weights alone, in another thread; raises EngineBusy until they are written: call again."""
        self.require_weights()
        self.writer.write(Path(path))

    def of_ranks(self, look: Callable[[], _T]) -> list[_T]:
        """Call ``look`` on every rank and return all results on every rank. All ranks must call this together.

        Raises:
            FailedElsewhere: ``look`` raised on another rank; an error on this rank is raised as is.
        """
        if self.group is None:
            return [look()]
        error: Exception | None = None
        own: _T | None = None
        try:
            own = look()
        except Exception as raised:
            error = raised
        gathered: list[Any] = self.gather((error is None, own))
        if error is not None:
            raise error
        if not all(fine for fine, _ in gathered):
            raise FailedElsewhere
        return [seen for _, seen in gathered]

    def gather(self, own: _T) -> list[_T]:
        """Gather each rank's value on every rank, in rank order."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(gathered, own, group=self.group)
        return gathered
