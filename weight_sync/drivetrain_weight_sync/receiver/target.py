"""What the receiver asks of an engine's model in one worker, and the answer of a plain torch module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Protocol

import torch
from torch import nn

from drivetrain.errors import EngineStateError, WeightTransferFailed
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.tensors.names import base_name
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name
from drivetrain_weight_sync.tensors.storages import place_of


class WeightTarget(Protocol):
    """An engine's model, as one worker holds it. Names are checkpoint names, not the engine's fused ones."""

    def manifest(self) -> WeightManifest:
        """Name every tensor that a complete update must bring. Works while the weights sleep."""
        ...

    def check_ready(self) -> None:
        """Raise :class:`EngineStateError` if the model cannot take weights now. Changes nothing."""
        ...

    def begin(self) -> None:
        """Make ready to load. From here on the weights may hold anything until :meth:`finish`."""
        ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        """Copy these into the model; they may change as soon as this returns. All of a layer come in one call.

        ``place`` says that what is launched on a GPU before this returns finds each as it is, and that at another time
        the same place means the same tensors at the same addresses. With None, each is there only until the next is
        asked for, but for :attr:`converted` ones.
        """
        ...

    @property
    def converted(self) -> Set[str]:
        """Names of tensors that the engine keeps in another form, quantised or packed: they cannot be read back."""
        ...

    def forms_of(self, name: str) -> list[torch.Tensor]:
        """Return what the engine holds of a tensor: the tensor, or what it made of it and of others."""
        ...

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        """Make again the copies of an earlier load from this place that are digested on the way; return whose.

        Nothing is done if any is of a tensor that is not ``among`` these.
        """
        ...

    def expect(self, digests: Mapping[str, int]) -> Set[str]:
        """Say which digests tensors should have; return whose are seen while they are copied, since :meth:`begin`.

        The other tensors are read back.
        """
        ...

    def differing(self) -> list[str]:
        """Of those that were seen on the way, the tensors whose digests are not as expected. After :meth:`finish`."""
        ...

    def finish(self) -> None:
        """Everything is loaded: do what the engine needs before it computes with the weights."""
        ...

    def cancel(self) -> None:
        """The update will not be completed. Leave the model able to take another."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor that the engine computes with (a view, where there is one); of a split one, the part."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of the checkpoint tensor, contiguous; of a split one, zeros where other ranks hold it."""
        ...

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what this worker takes of a checkpoint tensor, as :meth:`read` gives it; None if it takes all."""
        ...


class ModuleTarget:
    """Copies straight into the parameters and persistent buffers of a torch module.

    Storage never moves. Layers that peft wrapped keep their checkpoint names, and adapters are left out. Tied
    parameters are named once; their other names are aliases. What transformers stacked is named piece by piece.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._seen: dict[str, Hashable] = {}
        self._look()

    def manifest(self) -> WeightManifest:
        """Name every parameter and persistent buffer, in the module's order."""
        self._look()
        return WeightManifest(
            tuple(spec_of(name, tensor) for name, tensor in self._tensors.items()), dict(self._aliases)
        )

    def check_ready(self) -> None:
        """Raise :class:`EngineStateError` if memory of a tensor was given back."""
        self._look()
        for name in self._tensors:
            self.destination(name)

    def begin(self) -> None:
        """Find the tensors again: adapters may have come or gone."""
        self._look()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        """Copy in place. Dtypes and shapes are those of the manifest."""
        for name, tensor in tensors:
            self.destination(name).copy_(tensor)

    @property
    def converted(self) -> Set[str]:
        """None."""
        return frozenset()

    def forms_of(self, name: str) -> list[torch.Tensor]:
        """The parameter or buffer itself."""
        return [self.read(name)]

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        """No copy is digested on the way."""
        return frozenset()

    def expect(self, digests: Mapping[str, int]) -> Set[str]:
        """All are read back."""
        return frozenset()

    def differing(self) -> list[str]:
        """None was seen on the way."""
        return []

    def finish(self) -> None:
        """Wait until copies to a GPU have been made."""
        for device in {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)

    def cancel(self) -> None:
        """Nothing to undo."""

    def read(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer itself."""
        return self.destination(name).detach()

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of it."""
        return self.read(name).clone(memory_format=torch.contiguous_format)

    def part_of(self, name: str, tensor: torch.Tensor) -> None:
        """A module takes all of every tensor."""
        return None

    def destination(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer of that name or alias.

        Raises:
            WeightTransferFailed: there is none.
            EngineStateError: its memory was given back by sleep.
        """
        tensor = self._tensors.get(self._aliases.get(name, name))
        if tensor is None:
            raise WeightTransferFailed(f"the model has no tensor {name!r}; names are those of weight_manifest()")
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
        # All at once: another thread may be reading.
        self._tensors, self._aliases, self._seen = tensors, aliases, seen
