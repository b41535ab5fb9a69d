"""The model's weights: update, read, sleep."""

from __future__ import annotations

from pathlib import Path

import torch

from drivetrain.errors import EngineStateError
from drivetrain.types.weights import (
    BeginUpdate,
    CommunicatorSpec,
    PrepareUpdate,
    TensorData,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
)
from drivetrain_transformers.model import LoadedModel
from drivetrain_weight_sync import ModuleTarget, Receiver, WeightWriter, read_weight, validate_weights
from drivetrain_weight_sync.receiver.sleeping_memory import falling_asleep, waking_up
from drivetrain_weight_sync.transports.process_groups import Groups


class Weights:
    """The engine's end of weight updates. Called in the scheduler's thread only, unless stated otherwise.

    Args:
        model: The model.
        keep: Keep a copy in host memory while the weights sleep.
    """

    def __init__(self, model: LoadedModel, *, keep: bool) -> None:
        self._module = model.module
        self._target = ModuleTarget(model.module)
        self._receiver = Receiver(self._target)
        self._writer = WeightWriter(self._target)
        self._keep = keep
        self._asleep: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    @property
    def nbytes(self) -> int:
        """Memory held by parameters and buffers, in bytes."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    def manifest(self) -> WeightManifest:
        """Return every tensor that a complete update must bring."""
        return self._target.manifest()

    def prepare(self, message: PrepareUpdate) -> WeightReply | None:
        """Prepare an update; return None while its source is being opened, then poll :meth:`prepared`."""
        self._receiver.prepare(message)
        return self._receiver.prepared()

    def prepared(self) -> WeightReply | None:
        """Return the reply to the last PrepareUpdate, or None while its source is still being opened."""
        return self._receiver.prepared()

    def receive(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update other than PrepareUpdate."""
        if isinstance(message, BeginUpdate):
            self._writer.stop()
        return self._receiver.handle(message)

    def require_awake(self) -> None:
        """Raise :class:`EngineStateError` if the weights are asleep."""
        if self._asleep:
            raise EngineStateError("the weights are asleep; call wake_up() first", state="asleep")

    @property
    def groups(self) -> Groups:
        """Groups of trainers that broadcast to this engine."""
        return self._receiver.groups

    def join(self, spec: CommunicatorSpec) -> None:
        """Join a group in which a trainer broadcasts, waiting until it forms. May be called in any thread."""
        self._receiver.groups.join(spec, spec.rank_offset, next(self._module.parameters()).device)

    def leave(self, group_name: str) -> None:
        """Leave the group."""
        self._receiver.groups.leave(group_name)

    def read(self, name: str) -> TensorData:
        """Return a copy of one tensor, by its checkpoint name or alias."""
        return read_weight(self._target, name)

    def validate(self) -> WeightReport:
        """Check every tensor for NaN, infinity, and nothing but zeros."""
        return validate_weights(self._target)

    def write(self, folder: Path) -> None:
        """Write the weights to a folder in another thread; raises EngineBusy until they are written: call again."""
        self._writer.write(folder)

    def sleep(self) -> None:
        """Free the memory of all tensors that an update brings, once all are copied that must be kept.

        Other buffers keep their memory.
        """
        if not self._asleep:  # else an earlier sleep has ended after its deadline
            self._writer.stop()
            self._receiver.forget_held()
            with falling_asleep():
                self._asleep = self._copied()
        for storage, _, _ in self._asleep:
            storage.resize_(0)

    def _copied(self) -> list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]:
        """Return each storage with its size in bytes and, if it must be kept, a copy."""
        copied = []
        tensors = [self._target.read(spec.name) for spec in self._target.manifest().tensors]
        # Several tensors may be views of one parameter, whose memory is freed once.
        for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values():
            storage = tensor.untyped_storage()
            kept = None
            if self._keep:
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                kept.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            copied.append((storage, storage.nbytes(), kept))
        return copied

    def free(self) -> None:
        """Free all memory of the model for good, even if the module is still referenced."""
        self._writer.stop()
        self._receiver.close()
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            tensor.untyped_storage().resize_(0)
        self._asleep = []

    def wake_up(self) -> None:
        """Allocate the weights' memory again; without a kept copy, its values are undefined.

        If that fails, all weights sleep on.
        """
        try:
            with waking_up():
                for storage, nbytes, kept in self._asleep:
                    storage.resize_(nbytes)
                    if kept is not None:
                        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)
        except BaseException:
            for storage, _, _ in self._asleep:
                storage.resize_(0)
            raise
        self._asleep = []
