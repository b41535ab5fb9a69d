"""Tensors that an engine computes from loaded ones, such as the two halves of a projection that MLA multiplies apart.

No update brings them: after each they are computed anew, by the engine's own code, and stay where they are, since CUDA
graphs know their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.errors import WeightSyncError, WeightTransferFailed
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.operations import tensors_in, written_to


@dataclass(frozen=True, slots=True)
class AfterLoading:
    """What an engine does once weights are loaded."""

    name: str
    """Of the module, for errors."""
    module: nn.Module
    """Which it changes, with all that is beneath."""
    compute: Callable[[], object]
    """Does it; also a second time."""


def casts_of_weights(model: nn.Module) -> Iterator[AfterLoading]:
    """Yield a step for each buffer in which a module keeps one of its parameters in another dtype.

    Some engines fill such a buffer at the first forward pass and never read the parameter again, as SGLang 0.5.17 does
    in GLM-4.5's gate. A buffer that is still empty is told by its name: ``_weight_fp32`` of ``weight``.
    """
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            held = module._buffers.get(name)
            for of, parameter in module.named_parameters(recurse=False):
                if held is None:
                    is_cast, dtype = name == f"_{of}_fp32", torch.float32
                else:
                    is_cast, dtype = _is_cast(held, parameter), held.dtype
                if is_cast:
                    yield AfterLoading(path, module, partial(_cast, module, of, name, dtype))


def _is_cast(held: torch.Tensor, parameter: torch.Tensor) -> bool:
    if held.shape != parameter.shape or storage_of(held) == storage_of(parameter):
        return False
    return _equal(held, parameter.detach().to(held.dtype))


def _cast(module: nn.Module, parameter: str, buffer: str, dtype: torch.dtype) -> None:
    setattr(module, buffer, module._parameters[parameter].detach().to(dtype))  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor, and whose attribute it is."""

    owner: Any
    name: str
    tensor: torch.Tensor

    def put(self) -> None:
        """Make it that attribute again."""
        setattr(self.owner, self.name, self.tensor)


class Derived:
    """What an engine derives from its weights; made while they are as they were loaded.

    Args:
        steps: Each is taken once here: one that looks at no weights is left out later.
        weights: What updates bring.
        cache: Keys and values, which no step is to write to, and which are as large as memory is.

    Raises:
        WeightSyncError: taken a second time, a step does not come to what is there, writes to weights, or fails; all is
            as it was.
    """

    def __init__(
        self,
        steps: Iterable[AfterLoading],
        weights: Iterable[torch.UntypedStorage],
        cache: Iterable[torch.UntypedStorage] = (),
    ) -> None:
        of_weights, of_cache = (frozenset(storage._cdata for storage in some) for some in (weights, cache))
        self._steps = [step for step in steps if _looks_at(step, of_weights, of_cache)]

    def refresh(self) -> bool:
        """Compute all of it anew, from the weights that are there now; whether there was any.

        Raises:
            WeightTransferFailed: something has another shape than before.
        """
        for step in self._steps:
            _take(step)
        return bool(self._steps)


def _looks_at(step: AfterLoading, weights: Set[int], cache: Set[int]) -> bool:
    """Whether a step looks at weights; it is taken, and found to come to what is there already."""
    held = _held(step.module)
    # Weights and cache are large, and are not written to.
    values = {place: one.tensor.clone() for place, one in held.items() if storage_of(one.tensor) not in weights | cache}
    looks = _Looks(weights, cache)
    try:
        with looks:
            _take(step)
        after = _held(step.module)
        same = all(_equal(value, after[place].tensor) for place, value in values.items())
        why = "comes to something else a second time"
    except Exception as error:
        same, why = False, f"fails a second time ({type(error).__name__}: {error})"
    if not same:
        for one in held.values():
            one.put()
        for place, value in values.items():
            held[place].tensor.data.copy_(value)
        raise WeightSyncError(
            f"what the engine does in {step.name} once weights are loaded {why}; weight sync cannot follow that yet"
        )
    return looks.found


class _Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether weights are looked at, and lets neither them nor the cache be written to."""

    def __init__(self, weights: Set[int], cache: Set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._kept = weights | cache
        self.found: bool = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _any_of(self._kept, *written_to(func, args, kwargs)):
            if func is not torch.ops.aten.copy_.default or _place(args[0]) != _place(args[1]):  # onto itself
                raise NotImplementedError(f"{func} would write to weights, or to the cache")
        self.found = self.found or _any_of(self._weights, args, kwargs)
        return func(*args, **(kwargs or {}))


def _any_of(storages: Set[int], *values: object) -> bool:
    return any(storage_of(tensor) in storages for tensor in tensors_in(*values))


@torch.no_grad()
def _take(step: AfterLoading) -> None:
    """Take a step, and leave tensors where they are."""
    before = _held(step.module)
    step.compute()
    after = _held(step.module)
    lost = [place for place in before if place not in after]
    for place, new in after.items():
        old = before.get(place)
        if old is None or old.tensor is new.tensor:
            continue
        if _layout(old.tensor) != _layout(new.tensor):
            lost.append(place)
            continue
        if old.tensor.data_ptr() != new.tensor.data_ptr():
            old.tensor.copy_(new.tensor)
        old.put()
    if lost:
        raise WeightTransferFailed(f"{step.name} holds other tensors than before once its weights were loaded again")


def _held(module: nn.Module) -> dict[tuple[int, str], _Held]:
    """The tensors of a module and of what it is made of, by owner and name."""
    found: dict[tuple[int, str], _Held] = {}
    for owner in _owners(module):
        own = dict(vars(owner))
        if isinstance(owner, nn.Module):
            own |= {**owner._parameters, **owner._buffers}
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                found[id(owner), name] = _Held(owner, name, value)
    return found


def _owners(module: nn.Module) -> Iterator[Any]:
    """Modules, and what is no module but holds tensors for one, as attention backends do."""
    for part in module.modules():
        yield part
        for value in vars(part).values():
            if not isinstance(value, nn.Module | torch.Tensor | type) and hasattr(value, "__dict__"):
                if any(isinstance(held, torch.Tensor) for held in vars(value).values()):
                    yield value


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), *_layout(tensor)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )
