"""The receiver's view of an engine's model in one worker, and its implementation for a plain torch module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Protocol

import torch
from torch import nn

from drivetrain.errors import EngineStateError, WeightTransferFailed
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.copying.waiting import wait_for
from drivetrain_weight_sync.tensors.checkpoint_names import base_name
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name
from drivetrain_weight_sync.tensors.storages import place_of


class WeightTarget(Protocol):
    """An engine's model as held by one worker. Names are checkpoint names, not the engine's fused ones."""

    def manifest(self) -> WeightManifest:
        """Return every tensor that a complete update must bring. Works while the weights are asleep."""
        ...

    def check_ready(self) -> None:
        """Raise :class:`EngineStateError` if the model cannot take weights now. Changes nothing."""
        ...

    def get_ready(self) -> bool:
        """Do part of the slow preparations while the engine serves; return True once they are complete.

        Optional. Called until it returns True before an update whose tensors lie at stable addresses.
        """
        ...

    def begin(self) -> None:
        """Get ready to load. Until :meth:`finish`, the weights may hold anything."""
        ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        """Copy tensors into the model; they may change as soon as this returns. A layer's tensors come in one call.

        ``place`` is a stable-address key. If it is given, work launched on a GPU before this returns may still read the
        tensors, and the same key later means the same tensors at the same addresses. If it is None, each tensor is
        valid only until the next one is read, except those of :attr:`converted`.
        """
        ...

    @property
    def converted(self) -> Set[str]:
        """Names of tensors that the engine keeps in another form, quantised or packed; they cannot be read back."""
        ...

    def forms_of(self, name: str) -> list[torch.Tensor]:
        """Return the tensors that hold a checkpoint tensor's values: itself, or the engine's forms made from it."""
        ...

    def digests_converted(self, tensors: Mapping[str, torch.Tensor], place: Hashable) -> Set[str]:
        """Return the names of :attr:`converted` that :meth:`load` with this key itself copies and digests.

        The caller digests the others, and gives copies of them.
        """
        ...

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        """Replay the digested copies of an earlier load with this key; return the names of their tensors.

        Does nothing and returns an empty set unless all of them are in ``among``.
        """
        ...

    def expect(self, digests: Mapping[str, int]) -> Set[str]:
        """Set the expected digests; return the names whose copies since :meth:`begin` compute their own digest.

        The caller reads the other tensors back.
        """
        ...

    def differing(self) -> list[str]:
        """After :meth:`finish`, return the tensors whose copies computed another digest than expected."""
        ...

    def finish(self) -> None:
        """Do the work that the engine needs between the last load and its next forward pass."""
        ...

    def cancel(self) -> None:
        """Abandon the update, leaving the model able to take another."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor that the engine computes with, as a view if possible; of a split tensor, this part."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """Return a contiguous copy of the checkpoint tensor; elements that other ranks hold are zero."""
        ...

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this worker's part of a checkpoint tensor in the form of :meth:`read`; None if it takes all of it."""
        ...


class ModuleTarget:
    """A target that copies straight into the parameters and persistent buffers of a torch module.

    Storage never moves. Layers wrapped by peft keep their checkpoint names, and adapters are left out. Tied parameters
    are named once; their other names are aliases. Experts that transformers stacked are named one by one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._seen: dict[str, Hashable] = {}
        self._look()

    def manifest(self) -> WeightManifest:
        """Return every parameter and persistent buffer, in the module's order."""
        self._look()
        return WeightManifest(
            tuple(spec_of(name, tensor) for name, tensor in self._tensors.items()), dict(self._aliases)
        )

    def check_ready(self) -> None:
        """Raise :class:`EngineStateError` if memory of a tensor was given back."""
        self._look()
        for name in self._tensors:
            self.destination(name)

    def get_ready(self) -> bool:
        """Return True: this target needs no preparation."""
        return True

    def begin(self) -> None:
        """Find the tensors again: adapters may have been added or removed."""
        self._look()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        """Copy in place. Tensors have the manifest's dtypes and shapes."""
        for name, tensor in tensors:
            self.destination(name).copy_(tensor)

    @property
    def converted(self) -> Set[str]:
        """Always empty."""
        return frozenset()

    def forms_of(self, name: str) -> list[torch.Tensor]:
        """Return the parameter or buffer itself."""
        return [self.read(name)]

    def digests_converted(self, tensors: Mapping[str, torch.Tensor], place: Hashable) -> Set[str]:
        """Return an empty set: this target converts no tensor."""
        return frozenset()

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        """Return an empty set: no copy is digested."""
        return frozenset()

    def expect(self, digests: Mapping[str, int]) -> Set[str]:
        """Return an empty set, so that every tensor is read back."""
        return frozenset()

    def differing(self) -> list[str]:
        """Return nothing: no copy is digested."""
        return []

    def finish(self) -> None:
        """Wait until copies to a GPU have been made."""
        for device in {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}:
            wait_for(device)

    def cancel(self) -> None:
        """Do nothing: there is nothing to undo."""

    def read(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer itself."""
        return self.destination(name).detach()

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of the parameter or buffer."""
        return self.read(name).clone(memory_format=torch.contiguous_format)

    def part_of(self, name: str, tensor: torch.Tensor) -> None:
        """Return None: a module takes all of every tensor."""
        return None

    def destination(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer of that name or alias.

        Raises:
            WeightTransferFailed: there is none.
            EngineStateError: its memory was given back by sleep.
        """
        tensor = self._tensors.get(self._aliases.get(name, name))
        if tensor is None:
            raise WeightTransferFailed(f"the model has no tensor {name!r}; weight_manifest() lists the names")
        if tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise EngineStateError(
                f"the memory of {name} was given back by sleep; call wake_up(tags=[MemoryTag.WEIGHTS]) first",
                state="asleep",
            )
        return tensor

    def _look(self) -> None:
        state = {
            name: tensor
            for full_name, tensor in self._module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and (name := base_name(full_name)) is not None
        }
        seen = {name: place_of(tensor) for name, tensor in state.items()}
        if seen == self._seen:
            return
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        names: dict[Hashable, str] = {}
        for name, tensor in by_checkpoint_name(self._module, state).items():
            first = names.setdefault(place_of(tensor), name)
            if first == name:
                tensors[name] = tensor
            else:
                aliases[name] = first
        # Assign all at once: another thread may be reading.
        self._tensors, self._aliases, self._seen = tensors, aliases, seen
