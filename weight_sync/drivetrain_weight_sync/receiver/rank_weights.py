"""One rank of an engine, as far as weights go: the primitives of the ``Backend`` page, done where the weights are."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
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
    CommitUpdate,
    CommunicatorSpec,
    PrepareUpdate,
    TensorData,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
)
from drivetrain_weight_sync.copying import device_copies
from drivetrain_weight_sync.receiver.checkpoint_comparison import require_as_stored, require_converted_alike
from drivetrain_weight_sync.receiver.receiver import Receiver
from drivetrain_weight_sync.receiver.saving import WeightWriter
from drivetrain_weight_sync.receiver.weight_inspection import merged, require_tensor, tensor_data, validate_weights
from drivetrain_weight_sync.tracing.derived_tensors import AfterLoading, Derived, casts_of_weights
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts
from drivetrain_weight_sync.tracing.traced_target import TracedTarget
from drivetrain_weight_sync.transports.device_memory import uuid_of

_T = TypeVar("_T")


class RankWeights(ABC):
    """Base of an engine's worker. Methods are named as on the ``Backend`` page and mean the same.

    A subclass says which model it has, what the checkpoint holds, and who the other ranks are.
    """

    def __init__(self) -> None:
        self.asleep: set[MemoryTag] = set()
        """What was given back."""

    @property
    @abstractmethod
    def model(self) -> torch.nn.Module:
        """The engine's own."""

    @property
    @abstractmethod
    def checkpoint(self) -> WeightManifest:
        """What a trainer has of the model."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """Where the engine read its weights; None if they are its own invention."""

    @property
    @abstractmethod
    def group(self) -> Any:
        """The process group, on the CPU, of the ranks that take each call together; None when there is one."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This one's place among all ranks that hold weights."""

    @cached_property
    def target(self) -> TracedTarget:
        """The model's tensors by their checkpoint names. First asked for while there are weights, before any update.

        All ranks ask for it first in the same call, and not within :meth:`of_ranks`.

        Raises:
            WeightSyncError: the engine's weights cannot be followed.
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
        target.derived = Derived(steps, target.storages, self.cache())
        return target

    def _have_receiver(self) -> None:
        """Make it while all ranks are here, before one may find that it cannot do its part."""
        if "receiver" not in self.__dict__:
            self.of_ranks(self.require_weights)
            _ = self.receiver

    def after_loading(self) -> Iterable[AfterLoading]:
        """What the engine does once weights are loaded, module by module, after what quantisation does."""
        return ()

    def cache(self) -> Iterable[torch.UntypedStorage]:
        """The memory of keys and values, as far as modules of the model hold it."""
        return ()

    def converted(self) -> QuantisedParts | None:
        """Parts that the engine keeps in another form than its loader fills; None: there are none."""
        return None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors as the engine loads a checkpoint."""
        return self.model.load_weights(weights)  # type: ignore[operator]

    @cached_property
    def receiver(self) -> Receiver:
        """The end of an update."""
        return Receiver(self.target)

    @cached_property
    def writer(self) -> WeightWriter:
        """Writes weights beside what else goes on."""
        return WeightWriter(self.target)

    def require_weights(self) -> None:
        """Raise :class:`EngineStateError` if they sleep."""
        if MemoryTag.WEIGHTS in self.asleep:
            raise EngineStateError(
                "the memory of the weights was given back by sleep; call wake_up(tags=[MemoryTag.WEIGHTS]) first",
                state="asleep",
            )

    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that hold the weights, by rank; none on a CPU."""
        device = next(self.model.parameters()).device
        return self.of_ranks(lambda: uuid_of(device)) if device.type == "cuda" else []

    def weight_manifest(self) -> WeightManifest:
        """Tensors by their checkpoint names."""
        return self.target.manifest()

    def prepare_weights(self, message: PrepareUpdate) -> WeightReply | None:
        """Prepare an update; None: its source is being opened, ask :meth:`prepared_weights`."""
        self._have_receiver()

        def prepare() -> WeightReply | None:
            self.require_weights()
            self.receiver.prepare(message)
            return self.receiver.prepared()

        return self._once_all_have(prepare)

    def prepared_weights(self) -> WeightReply | None:
        """The reply to the last PrepareUpdate; None: a rank is still opening its source."""
        return self._once_all_have(lambda: self.receiver.prepared())

    def _once_all_have(self, reply: Callable[[], WeightReply | None]) -> WeightReply | None:
        replies = self.of_ranks(reply)
        return None if None in replies else replies[self.rank]

    def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update, but the first."""
        if isinstance(message, BeginUpdate):
            self.writer.stop()
        return self.receiver.handle(message)

    def begin_weights(self, update: ApplyUpdate) -> WeightReply:
        """Begin a prepared update and load every bucket; on a GPU the copies go on after this returns."""
        self.receive_weights(BeginUpdate())
        return self.receive_weights(update.load)

    def commit_weights(self, update: ApplyUpdate) -> WeightReply:
        """Verify what was loaded and commit it; no rank commits what another could not verify."""
        self.of_ranks(lambda: self.receive_weights(VerifyUpdate()))
        return self.receive_weights(CommitUpdate(update.version))

    def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a group in which a trainer broadcasts; raises EngineBusy, to be asked again, while it forms."""
        device = next(self.model.parameters()).device
        self.receiver.groups.join_behind(spec, spec.rank_offset + self.rank, device)

    def destroy_communicator(self, group_name: str) -> None:
        """Leave it."""
        self.receiver.groups.leave(group_name)

    def read_weight(self, name: str) -> TensorData:
        """Copy one tensor out."""
        self.require_weights()
        target = self.target
        require_tensor(target, name)
        if self.group is None:
            return tensor_data(name, target.read(name))
        pieces = itertools.chain.from_iterable(self.of_ranks(lambda: target.pieces(name)))
        return tensor_data(name, target.assembled(name, pieces))

    def validate_weights(self) -> WeightReport:
        """Look at every tensor where it lies."""
        self._have_receiver()

        def validate() -> WeightReport:
            self.require_weights()
            return validate_weights(self.target)

        return merged(self.of_ranks(validate))

    def save_sharded(self, path: str) -> None:
        """Write the weights alone, in another thread; raises EngineBusy, to be asked again, until they are there."""
        self.require_weights()
        self.writer.write(Path(path))

    def of_ranks(self, look: Callable[[], _T]) -> list[_T]:
        """What each rank sees, on every rank. All come here together, or none does.

        Raises:
            FailedElsewhere: another rank's ``look`` raised; what this rank's raises goes on.
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
        """What each rank brings, by rank."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(gathered, own, group=self.group)
        return gathered
