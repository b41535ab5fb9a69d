"""The parameters of the model: updated, read, put to sleep."""

from __future__ import annotations

from pathlib import Path

import torch

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


class Weights:
    """What the engine's side of a weight update works on. Called in the runner's thread only.

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
        """Every tensor that a complete update must bring."""
        return self._target.manifest()

    def prepare(self, message: PrepareUpdate) -> WeightReply | None:
        """Prepare an update; None: its source is being opened, ask :meth:`prepared`."""
        self._receiver.prepare(message)
        return self._receiver.prepared()

    def prepared(self) -> WeightReply | None:
        """The reply to the last PrepareUpdate; None: its source is still being opened."""
        return self._receiver.prepared()

    def receive(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update, but the first."""
        if isinstance(message, BeginUpdate):
            self._writer.stop()
        return self._receiver.handle(message)

    def join(self, spec: CommunicatorSpec) -> None:
        """Join a group in which a trainer broadcasts; waits for it. May be called in any thread."""
        self._receiver.groups.join(spec, spec.rank_offset, next(self._module.parameters()).device)

    def leave(self, group_name: str) -> None:
        """Leave it."""
        self._receiver.groups.leave(group_name)

    def read(self, name: str) -> TensorData:
        """Copy one tensor out, by its checkpoint name or alias."""
        return read_weight(self._target, name)

    def validate(self) -> WeightReport:
        """Look at every tensor."""
        return validate_weights(self._target)

    def write(self, folder: Path) -> None:
        """Write them to a folder in another thread; raises EngineBusy, to be asked again, until they are there."""
        self._writer.write(folder)

    def sleep(self) -> None:
        """Give back the memory of all that an update brings; buffers that no update brings stay."""
        self._writer.stop()
        self._receiver.forget_held()
        tensors = [self._target.read(spec.name) for spec in self._target.manifest().tensors]
        # Several may be pieces of one parameter, whose memory is given back once.
        for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values():
            storage = tensor.untyped_storage()
            kept = None
            if self._keep:
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                kept.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            self._asleep.append((storage, storage.nbytes(), kept))
            storage.resize_(0)

    def free(self) -> None:
        """Give back all memory of the model for good, whoever still holds the module."""
        self._writer.stop()
        self._receiver.close()
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            tensor.untyped_storage().resize_(0)
        self._asleep = []

    def wake_up(self) -> None:
        """Take that memory again; without a kept copy it holds no defined values."""
        for storage, nbytes, kept in self._asleep:
            storage.resize_(nbytes)
            if kept is not None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)
        self._asleep = []
