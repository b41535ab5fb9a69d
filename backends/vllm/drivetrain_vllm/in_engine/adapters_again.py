# pyright: reportPrivateImportUsage=false
"""Load another adapter of a form that vLLM has loaded before, without its work for each tensor.

A trainer pushes the same adapter again and again, with other values. VLLM parses each tensor's name, and makes several
small copies for each layer: tens of milliseconds for some hundred tensors. Here the first load of a form is vLLM's own.
Its result is remembered as a template, and its copies into a slot are traced and compared with what vLLM wrote; a later
load fills the template, and makes the copies together.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter
from drivetrain_weight_sync.tensors.dtypes import as_bits, spec_of
from drivetrain_weight_sync.tracing.loader_trace import Copy, trace_loader

_MOST_FORMS: Final = 8
"""Most templates kept."""

Names = list[str | None]
Weights = tuple[str, Any, Any]
"""A layer's name, and its A and B: tensors, or lists of tensors of a fused layer, where None stands for no adapter."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of vLLM's ``LoRAModel``."""

    name: str
    weights: Any
    """VLLM's object, without tensors."""
    a: Names
    b: Names
    """Names of its tensors in the adapter."""
    is_fused: bool


@dataclass(eq=False, slots=True)
class _Form:
    """An adapter's configuration and tensor shapes, which vLLM has loaded once."""

    config: Mapping[str, object]
    tensors: Mapping[str, object]
    model: Any
    """VLLM's ``LoRAModel``, without layers."""
    layers: list[_Layer]
    scales: dict[float, list[str]]
    """Names of the tensors that vLLM multiplies, by factor."""
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    """By slot: the copies that filled it, one or more for each tensor, in the order of ``sources``."""
    sources: dict[int, list[int]] = field(default_factory=dict)
    """By slot: the index of each copy's tensor."""
    can_copy: bool = True
    """False once a slot was found to hold something else than copies of the tensors."""


class LoadsAgain:
    """Wraps vLLM's manager of slots.

    Args:
        manager: The ``LoRAModelManager``.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._forms: list[_Form] = []
        self._form_of: weakref.WeakKeyDictionary[Any, _Form] = weakref.WeakKeyDictionary()
        """Form of each ``LoRAModel`` that was made from tensors in memory."""
        self._first: weakref.WeakKeyDictionary[Any, tuple[HeldAdapter, dict[str, float]]] = weakref.WeakKeyDictionary()
        """For each ``LoRAModel`` of a new form that is in no slot yet: its tensors, and the factor of each."""
        self._in_slot: dict[int, _Form | None] = {}
        """Form of the adapter that was last written to each slot: outside of its copies, the slot holds zeros."""
        self._has_heads = any(hasattr(layer, "set_module_to_save") for layer in manager.modules.values())
        """True if vLLM gives whole classification heads to slots, too."""
        self._activate = manager.activate_adapter
        manager.activate_adapter = self.activate

    def filled(self, held: HeldAdapter, number: int) -> Any | None:
        """Return vLLM's ``LoRAModel`` for an adapter whose form was loaded before; None if it was not."""
        tensors, described = held.tensors, held.described()
        form = next((one for one in self._forms if one.config == held.config and one.tensors == described), None)
        if form is None:
            return None
        for factor, names in form.scales.items():
            torch._foreach_mul_([tensors[name] for name in names], factor)
        model = copy.copy(form.model)
        model.id, model.loras = number, {layer.name: _filled(layer, tensors) for layer in form.layers}
        self._form_of[model] = form
        return model

    def noted(self, held: HeldAdapter, model: Any) -> Any:
        """Remember a ``LoRAModel`` that vLLM made, and return it."""
        names = {id(tensor): name for name, tensor in held.tensors.items()}
        factors = {names[id(lora.lora_b)]: lora.scaling for lora in model.loras.values() if id(lora.lora_b) in names}
        self._first[model] = held, factors
        return model

    def activate(self, number: int) -> Any:
        """Put a registered adapter into a slot, in place of vLLM's ``activate_adapter``."""
        manager = self._manager
        model = manager._registered_adapters.cache.get(number)
        if number in manager._active_adapters or model is None:
            return self._activate(number)
        if model in self._first:
            self._note_form(model, *self._first.pop(model))
        layers = manager.modules
        name = next((name for name in layers if model.get_lora(name) is not None), None)
        # VLLM chooses the slot, and writes to it through this one layer.
        if name is not None and not self._has_heads:
            manager.modules = {name: _AllLayers(self, model, layers)}
        try:
            return self._activate(number)
        finally:
            if manager.modules is layers:
                self._in_slot.clear()
            manager.modules = layers

    def write(self, slot: int, model: Any, layers: Mapping[str, Any]) -> None:
        """Write an adapter into a slot: copy all at once if the slot held this form before, else as vLLM does."""
        form = self._form_of.get(model)
        before, self._in_slot[slot] = self._in_slot.get(slot), None  # unknown until the write is complete
        if form is not None and before is form and slot in form.copies:
            self._copy(form.copies[slot], form.sources[slot], _tensors(_weights(model)))
        else:
            for name, layer in layers.items():
                weights = self._manager._get_lora_layer_weights(model, name)
                if weights:
                    layer.set_lora(slot, weights.lora_a, weights.lora_b)
                else:
                    layer.reset_lora(slot)
            if form is not None and form.can_copy and slot not in form.copies:
                form.can_copy = self._trace(form, slot, model, layers)
        self._in_slot[slot] = form

    def _note_form(self, model: Any, held: HeldAdapter, factors: Mapping[str, float]) -> None:
        """Remember the form of a model, unless vLLM made new tensors for it."""
        names = {id(tensor): name for name, tensor in held.tensors.items()}
        layers: list[_Layer] = []
        for name, lora in model.loras.items():
            fused = isinstance(lora.lora_a, list)
            parts = [lora.lora_a, lora.lora_b] if fused else [[lora.lora_a], [lora.lora_b]]
            if any(tensor is not None and id(tensor) not in names for part in parts for tensor in part):
                return
            a, b = ([None if tensor is None else names[id(tensor)] for tensor in part] for part in parts)
            weights = copy.copy(lora)
            weights.lora_a = weights.lora_b = None
            layers.append(_Layer(name, weights, a, b, fused))
        scales: dict[float, list[str]] = {}
        for name, factor in factors.items():
            if factor != 1:
                scales.setdefault(factor, []).append(name)
        without = copy.copy(model)
        without.loras = {}
        form = _Form(dict(held.config), held.described(), without, layers, scales)
        self._forms = [*self._forms[1 - _MOST_FORMS :], form]
        self._form_of[model] = form

    @staticmethod
    @torch.no_grad()
    def _copy(copies: Iterable[Copy], sources: Iterable[int], tensors: list[torch.Tensor]) -> None:
        parts = [copy.part_of(tensors[index]) for copy, index in zip(copies, sources, strict=True)]
        torch._foreach_copy_([copy.destination for copy in copies], parts)

    @staticmethod
    def _trace(form: _Form, slot: int, model: Any, layers: Mapping[str, Any]) -> bool:
        """Record the copies by which vLLM filled a slot; return False if they do not explain its values."""
        weights = list(_weights(model))
        tensors = _tensors(weights)

        def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
            of = {id(tensor): one for tensor, (_, one) in zip(tensors, given, strict=True)}
            for name, a, b in weights:
                layers[name].set_lora(slot, _replaced(a, of), _replaced(b, of))

        try:
            trace = trace_loader(load, [spec_of(str(index), tensor) for index, tensor in enumerate(tensors)])
        except WeightSyncError:
            return False
        found = [(copy, int(name)) for name, copies in trace.copies.items() for copy in copies]
        if trace.computed or not all(
            torch.equal(as_bits(copy.destination), as_bits(copy.part_of(tensors[index]))) for copy, index in found
        ):
            return False
        form.copies[slot], form.sources[slot] = [copy for copy, _ in found], [index for _, index in found]
        return True


class _AllLayers:
    """Stands in for the layers of a model while vLLM puts an adapter into a slot."""

    def __init__(self, loads: LoadsAgain, model: Any, layers: Mapping[str, Any]) -> None:
        self._loads = loads
        self._model = model
        self._layers = layers

    def set_lora(self, index: int, *_: object) -> None:
        """Write the whole adapter into a slot."""
        self._loads.write(index, self._model, self._layers)


def _filled(layer: _Layer, tensors: Mapping[str, torch.Tensor]) -> Any:
    weights = copy.copy(layer.weights)
    a, b = ([None if name is None else tensors[name] for name in names] for names in (layer.a, layer.b))
    weights.lora_a, weights.lora_b = (a, b) if layer.is_fused else (a[0], b[0])
    return weights


def _weights(model: Any) -> Iterator[Weights]:
    for name, lora in model.loras.items():
        yield name, lora.lora_a, lora.lora_b


def _tensors(weights: Iterable[Weights]) -> list[torch.Tensor]:
    parts = (part for _, a, b in weights for part in (a, b))
    return [tensor for part in parts for tensor in (part if isinstance(part, list) else [part]) if tensor is not None]


def _replaced(part: Any, of: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(part, list):
        return [None if tensor is None else of[id(tensor)] for tensor in part]
    return of[id(part)]
