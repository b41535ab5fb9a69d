"""Where the tensors of a push come from: a module, a mapping, or named tensors read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, WeightPlanMismatch, WeightSyncError
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.tensors.names import base_name, unwrapped
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.merged_adapters import without_adapters

NamedTensors = Iterable[tuple[str, torch.Tensor]]
WeightInput = nn.Module | Mapping[str, torch.Tensor] | NamedTensors | Callable[[], NamedTensors]


class Source:
    """Named tensors, under their checkpoint names.

    A module and a mapping are *held*: their tensors stay as they are while a push goes on. Pairs are *streamed*:
    they are read once per push, and a tensor may be overwritten as soon as the next is asked for. A generator
    can be read only once; a function that returns one can be read at every push.
    """

    def __init__(self, given: WeightInput, names: InMemoryNames | None = None) -> None:
        if not isinstance(given, nn.Module | Mapping | Iterable) and not callable(given):
            raise InvalidRequest(
                f"source is a {type(given).__name__}; give a torch module, a mapping of names to tensors, "
                "(name, tensor) pairs, or a function that returns such pairs",
                field="source",
            )
        self._given = given
        self._names = names
        self._spent = False

    @property
    def held(self) -> bool:
        """Whether the tensors stay as they are while a push goes on."""
        return isinstance(self._given, nn.Module | Mapping)

    @property
    def gpu(self) -> torch.device | None:
        """Where the first tensor of a held source that is on a GPU lies; streamed ones are not looked at."""
        tensors: Iterable[object] = ()
        if isinstance(self._given, nn.Module):
            tensors = self._given.parameters()
        elif isinstance(self._given, Mapping):
            tensors = self._given.values()
        return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda), None)

    def pairs(self, manifest: WeightManifest | None = None) -> list[tuple[str, torch.Tensor]]:
        """Return what a held source has, as it is given; :func:`by_name` makes tensors by name of it.

        With the engine's ``manifest``, names of a model in memory are those of its checkpoint, where that is certain.
        """
        pairs = list(self._pairs())
        if self._names is None or manifest is None:
            return pairs
        named = {unwrapped(name): tensor for name, tensor in pairs if isinstance(tensor, torch.Tensor)}
        return list(self._names.stored(named, manifest).items()) if len(named) == len(pairs) else pairs

    def stream(self, manifest: WeightManifest | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors one by one; for ``manifest`` see :meth:`pairs`.

        Raises:
            InvalidRequest: what is given are no pairs of a name and a tensor.
            WeightSyncError: a generator was read before, or a tensor is not a plain one.
        """
        for name, tensor in _checked(self._pairs()):
            if self._names is None or manifest is None:
                yield name, tensor
            else:
                yield from self._names.stored({name: tensor}, manifest).items()

    def _pairs(self) -> NamedTensors:
        given = self._given
        if isinstance(given, nn.Module):
            state = given.state_dict(keep_vars=True)
            pairs = [(name, tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]
            pairs = list(without_adapters(given, pairs))
            named = {unwrapped(name): tensor for name, tensor in pairs}
            return by_checkpoint_name(given, named).items() if len(named) == len(pairs) else pairs
        if isinstance(given, Mapping):
            return _without_wrappers(_named(given.items()))
        if callable(given):
            return _named(given())
        if isinstance(given, Iterator):
            if self._spent:
                raise WeightSyncError(
                    "the generator given as source was read by an earlier push and is empty now; to push more than "
                    "once, pass a function that returns a new one, such as model.named_parameters without its ()"
                )
            self._spent = True
        return _named(given)


def by_name(pairs: NamedTensors) -> dict[str, torch.Tensor]:
    """Return the tensors of a held source by their checkpoint names.

    Raises:
        WeightPlanMismatch: two tensors have one name once wrappers' prefixes are dropped.
        WeightSyncError: a tensor is not a plain one.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in _checked(pairs):
        if name in named:
            raise WeightPlanMismatch(f"the source holds {name} twice; give each tensor once", extra=[name])
        named[name] = tensor
    return named


def _without_wrappers(pairs: NamedTensors) -> NamedTensors:
    """The pairs by their checkpoint names, if they are those of a peft model without what adapters add to it."""
    held = list(pairs)
    names = [base_name(name) for name, _ in held]
    if None in names:
        return held
    return [(name or "", tensor) for name, (_, tensor) in zip(names, held, strict=True)]


def _named(pairs: object) -> NamedTensors:
    """Yield what a source gives, if it is pairs; their second items are left to :func:`_checked`."""
    if not isinstance(pairs, Iterable):
        raise _no_pairs(pairs)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _no_pairs(pair)
        yield pair[0], pair[1]


def _no_pairs(value: object) -> InvalidRequest:
    return InvalidRequest(f"source gives {shown(value)}; expected (name, tensor) pairs", field="source")


def _checked(pairs: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise WeightSyncError(f"{name} is a {type(tensor).__name__}; give a torch.Tensor")
        _require_plain(name, tensor)
        yield unwrapped(name), tensor.detach()


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "full_tensor"):
        raise WeightSyncError(f"{name} is a DTensor; gather it with full_tensor() and pass the whole tensor")
    if tensor.is_meta:
        raise WeightSyncError(f"{name} is on the meta device and holds no values; pass a tensor that has memory")
    if tensor.layout is not torch.strided:
        raise WeightSyncError(f"{name} has layout {tensor.layout}; pass a dense tensor (to_dense())")
