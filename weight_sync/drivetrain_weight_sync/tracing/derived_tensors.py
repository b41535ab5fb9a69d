"""Tensors that an engine computes from its weights, such as the two halves of an MLA projection.

Updates do not bring them. After each update the engine's own code computes them again, and the results are copied to
the old addresses, which CUDA graphs refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.errors import WeightSyncError, WeightTransferFailed
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.operations import tensors_in, written_to
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts


@dataclass(frozen=True, slots=True)
class AfterLoading:
    """A computation that an engine does after loading weights."""

    name: str
    """Name of the module, for errors."""
    module: nn.Module
    """The module whose tensors, submodules included, the step may change."""
    compute: Callable[[], object]
    """Runs the step; must be repeatable."""
    before_conversion: bool = False
    """True if the engine takes the step before it converts layers, so that it reads them as they were loaded."""


def casts_of_weights(model: nn.Module) -> Iterator[AfterLoading]:
    """Yield a step for each buffer in which a module keeps one of its parameters in another dtype.

    Some engines fill such a buffer at the first forward pass and never read the parameter again, as SGLang 0.5.17 does
    in GLM-4.5's gate. A buffer that is still empty is recognised by its name: ``_weight_fp32`` for ``weight``.
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
    """A tensor and the attribute that holds it."""

    owner: Any
    name: str
    tensor: torch.Tensor

    def put(self) -> None:
        """Set the attribute to this tensor again."""
        setattr(self.owner, self.name, self.tensor)


class Derived:
    """Repeats an engine's derived computations after each update; created while the loaded weights are unchanged.

    Args:
        steps: Every step is run once here; steps that do not read weights are dropped.
        weights: Storages that updates fill.
        cache: Storages of the KV cache. No step may write to them, and they are too large to copy.
        parts: Layers that the engine converts. Those that a step reads before their conversion are marked as kept.

    Raises:
        WeightSyncError: the repeated step gave other values, wrote to weights, or failed; everything was restored.
    """

    def __init__(
        self,
        steps: Iterable[AfterLoading],
        weights: Iterable[torch.UntypedStorage],
        cache: Iterable[torch.UntypedStorage] = (),
        parts: QuantisedParts | None = None,
    ) -> None:
        of_weights, of_cache = (frozenset(storage._cdata for storage in some) for some in (weights, cache))
        self._parts = parts
        self._steps = [step for step in steps if _looks_at(step, of_weights, of_cache, parts)]

    def refresh(self) -> bool:
        """Run every step on the current weights; return whether there was any.

        Raises:
            WeightTransferFailed: a tensor's shape or layout changed.
        """
        for step in self._steps:
            with _layers_of(step, self._parts, set() if self._parts is None else self._parts.kept):
                _take(step)
        if self._parts is not None:
            self._parts.forget_loaded()
        return bool(self._steps)


@contextmanager
def _layers_of(
    step: AfterLoading, parts: QuantisedParts | None, layers: Collection[nn.Module] | None
) -> Iterator[None]:
    """Show a step that precedes the conversion its layers as they were loaded; results of those not loaded stay."""
    if parts is None or not step.before_conversion or layers == set():
        yield
        return
    with parts.before_conversion(layers), _CopiesNoMeta():  # type: ignore[no-untyped-call]
        yield


class _CopiesNoMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips copies from meta tensors, which have no values, to others of their form."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            if (args[0].shape, args[0].dtype) != (args[1].shape, args[1].dtype):
                raise WeightTransferFailed(f"a tensor of {_form(args[1])} would be copied to one of {_form(args[0])}")
            return args[0]
        return func(*args, **(kwargs or {}))


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _looks_at(step: AfterLoading, weights: Set[int], cache: Set[int], parts: QuantisedParts | None) -> bool:
    """Return whether a step reads weights, after running it and checking that it repeats its values.

    Layers that it reads before their conversion are not checked: their loaded values are gone.
    """
    held = _held(step.module)
    attributes = [(owner, dict(vars(owner))) for owner in _owners(step.module)]
    unconverted = {} if parts is None or not step.before_conversion else parts.storages_before_conversion()
    # Weights and cache are too large to copy, and steps must not write to them.
    values = {place: one.tensor.clone() for place, one in held.items() if storage_of(one.tensor) not in weights | cache}
    looks = _Looks(weights | unconverted.keys(), cache)
    try:
        with _layers_of(step, parts, None), looks:
            _take(step)
        after = _held(step.module)
        same = all(_equal(value, after[place].tensor) for place, value in values.items())
        why = "gives other values when repeated"
    except Exception as error:
        same, why = False, f"fails when repeated ({type(error).__name__}: {error})"
    if not same:
        for owner, before in attributes:
            for name in vars(owner).keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)
        for one in held.values():
            one.put()
        for place, value in values.items():
            held[place].tensor.data.copy_(value)
        raise WeightSyncError(
            f"the engine's post-loading step of {step.name} {why}, which weight sync does not support yet"
        )
    if parts is not None:
        parts.kept |= {unconverted[storage] for storage in looks.read & unconverted.keys()}
    return bool(looks.read)


class _Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects reads of weights, and refuses writes to the weights or the cache."""

    def __init__(self, weights: Set[int], cache: Set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._kept = weights | cache
        self.read: set[int] = set()
        """Storages of weights that were read."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _any_of(self._kept, *written_to(func, args, kwargs)):
            if func is not torch.ops.aten.copy_.default or _place(args[0]) != _place(args[1]):  # onto itself
                raise NotImplementedError(f"{func} would write to weights, or to the cache")
        self.read |= self._weights & {storage_of(tensor) for tensor in tensors_in(args, kwargs)}
        return func(*args, **(kwargs or {}))


def _any_of(storages: Set[int], *values: object) -> bool:
    return any(storage_of(tensor) in storages for tensor in tensors_in(*values))


@torch.no_grad()
def _take(step: AfterLoading) -> None:
    """Run a step, keeping tensors at their addresses."""
    before = _held(step.module)
    step.compute()
    after = _held(step.module)
    lost = [place for place in before if place not in after]
    for place, new in after.items():
        old = before.get(place)
        if old is None and new.tensor.is_meta:
            lost.append(place)
        if old is None or old.tensor is new.tensor:
            continue
        if _layout(old.tensor) != _layout(new.tensor, of=old.tensor):
            lost.append(place)
            continue
        if not new.tensor.is_meta and old.tensor.data_ptr() != new.tensor.data_ptr():
            old.tensor.copy_(new.tensor)
        old.put()
    if lost:
        raise WeightTransferFailed(
            f"{step.name} has other tensors, or other shapes, after its weights were loaded again"
        )


def _held(module: nn.Module) -> dict[tuple[int, str], _Held]:
    """Return the tensors of a module and its parts, by owner and name."""
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
    """Yield a module's parts, and objects that hold tensors for them, such as attention backends."""
    for part in module.modules():
        yield part
        for value in vars(part).values():
            if not isinstance(value, nn.Module | torch.Tensor | type) and hasattr(value, "__dict__"):
                if any(isinstance(held, torch.Tensor) for held in vars(value).values()):
                    yield value


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), *_layout(tensor)


def _layout(tensor: torch.Tensor, of: torch.Tensor | None = None) -> tuple[object, ...]:
    """Return the layout of a tensor; a meta tensor that takes the place of another counts as on its device."""
    device = tensor.device if of is None or not tensor.is_meta else of.device
    return tensor.shape, tensor.stride(), tensor.dtype, device


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )
