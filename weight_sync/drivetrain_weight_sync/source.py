"""Where the tensors of a push come from: a module, a mapping, or named tensors read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import nn

from drivetrain.errors import InvalidRequest, WeightPlanMismatch, WeightSyncError
from drivetrain_weight_sync.names import unwrapped
from drivetrain_weight_sync.stacked import by_checkpoint_name

NamedTensors = Iterable[tuple[str, torch.Tensor]]
WeightInput = nn.Module | Mapping[str, torch.Tensor] | NamedTensors | Callable[[], NamedTensors]


class Source:
    """Named tensors, under their checkpoint names.

    A module and a mapping are *held*: their tensors stay as they are while a push goes on. Pairs are *streamed*:
    they are read once per push, and a tensor may be overwritten as soon as the next is asked for. A generator
    can be read only once; a function that returns one can be read at every push.
    """

    def __init__(self, given: WeightInput) -> None:
        if not isinstance(given, nn.Module | Mapping | Iterable) and not callable(given):
            raise InvalidRequest(
                f"source is a {type(given).__name__}; give a torch module, a mapping of names to tensors, "
                "(name, tensor) pairs, or a function that returns such pairs",
                field="source",
            )
        self._given = given
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

    def pairs(self) -> list[tuple[str, torch.Tensor]]:
        """Return what a held source has, as it is given; :func:`by_name` makes tensors by name of it."""
        return list(self._pairs())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors one by one.

        Raises:
            WeightSyncError: a generator was read before, or a tensor is not a plain one.
        """
        return _checked(self._pairs())

    def _pairs(self) -> NamedTensors:
        given = self._given
        if isinstance(given, nn.Module):
            state = given.state_dict(keep_vars=True)
            pairs = [(name, tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]
            named = {unwrapped(name): tensor for name, tensor in pairs}
            return by_checkpoint_name(given, named).items() if len(named) == len(pairs) else pairs
        if isinstance(given, Mapping):
            return cast("Mapping[str, torch.Tensor]", given).items()
        if callable(given):
            return given()
        if isinstance(given, Iterator):
            if self._spent:
                raise WeightSyncError(
                    "the generator given as source was read by an earlier push and is empty now; to push more than "
                    "once, pass a function that returns a new one, such as model.named_parameters without its ()"
                )
            self._spent = True
        return given


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
