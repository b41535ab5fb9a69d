"""LoRA adapters, loaded into the model by peft and selected per row."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drivetrain.errors import InvalidRequest
from drivetrain_transformers.adapter_names import AdapterNames
from drivetrain_weight_sync.receiver.lora_adapters import (
    AdapterChecks,
    GivenAdapter,
    LoraAdapter,
    LoraModule,
    named_alike,
)

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_D = TypeVar("_D", nn.ModuleDict, nn.ParameterDict)

NO_ADAPTER = "__base__"
"""peft's own name for a row that uses no adapter."""

_HONOURED: Final = frozenset({"lora_bias", "fan_in_fan_out"})
"""Fields of ``adapter_config.json`` that peft applies per row, beyond those of plain LoRA."""
_OF_PEFT: Final = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError)
"""Exceptions that peft raises for a layer that it cannot adapt."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Parameters that peft made for one adapter. Making them takes peft seconds in a deep model; they are reused."""

    name: str
    """peft's name for the adapter in the slot."""
    form: Hashable
    """Form of the adapters that fit."""
    parameters: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, compare=False)
    """Each parameter, and an empty tensor of its device and dtype, in the order of :func:`_values`."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    slot: _Slot
    number: int
    """Unique for each adapter ever loaded."""


class Adapters:
    """The adapters of one model. Rows of a batch may use different ones, or none.

    Args:
        module: The model.
        largest_rank: Largest rank of an adapter; None: no limit.
    """

    def __init__(self, module: PreTrainedModel, *, largest_rank: int | None) -> None:
        self._module = module
        self._largest_rank = largest_rank
        self._loaded: dict[str, _Loaded] = {}
        self._loads = 0
        self._free: list[_Slot] = []
        """Slots without an adapter."""
        self._slots = 0
        self._rows: list[str] = []
        self._tokens_per_row = 1
        self._hooked: set[nn.Module] = set()
        self._wrapped: dict[str, nn.Module] = {}
        """The layers that peft has wrapped, by name; looking for them takes milliseconds."""
        self._names = AdapterNames.of(module, adaptable_shapes(module))
        self._checks = AdapterChecks()

    def check(self, given: GivenAdapter) -> LoraAdapter:
        """Check an adapter. Safe from any thread while the weights do not change.

        Raises:
            InvalidRequest: its rank is too large, or it is no LoRA adapter of this model.
        """
        shapes = named_alike(given.tensors, self._names.namings)
        return self._names.renamed(
            self._checks.check(given, self._largest_rank, shapes, honours=_HONOURED, base=self._weight)
        )

    def load(self, name: str, adapter: LoraAdapter) -> None:
        """Add an adapter to the model.

        Raises:
            InvalidRequest: the name is taken, or peft cannot adapt one of the layers.
        """
        if name in self._loaded:
            raise InvalidRequest(f"lora_name={name!r} is loaded already; unload it first", field="lora_name")
        form, wrapped = _form(adapter), set(self._wrapped)
        slot = next((slot for slot in self._free if slot.form == form), None) or self._new_slot(form)
        try:
            if slot in self._free:
                self._free.remove(slot)
            else:
                self._inject(adapter, slot)
                for module, own in adapter.modules.items():
                    slot.parameters.extend(_parameters(self._wrapped[module], slot.name, own))
            _fill(slot, adapter)
        except BaseException as error:
            self._remove(slot.name)
            self._unwrap(set(self._wrapped) - wrapped)
            if not isinstance(error, _OF_PEFT):
                raise
            given = adapter.given
            raise InvalidRequest(f"peft cannot load {given.where}: {error}", field=given.field) from error
        self._loads += 1
        self._loaded[name] = _Loaded(slot, self._loads)

    def _new_slot(self, form: Hashable) -> _Slot:
        """Name a new slot; remove free ones of other forms until no more are free than are in use."""
        while len(self._free) > len(self._loaded):
            self._remove(self._free.pop(0).name)
        self._slots += 1
        return _Slot(f"slot-{self._slots}", form)

    def _inject(self, adapter: LoraAdapter, slot: _Slot) -> None:
        """Have peft add parameters to the adapter's layers.

        Not with ``low_cpu_mem_usage``: meanwhile every module that another thread makes would lose its values.
        """
        from peft import LoraConfig, inject_adapter_in_model

        ranks: dict[int, list[str]] = {}
        alphas: dict[float, list[str]] = {}
        for module, own in adapter.modules.items():
            ranks.setdefault(own.rank, []).append(module)
            alphas.setdefault(own.scale * own.rank, []).append(module)
        config = LoraConfig(
            r=adapter.rank,
            target_modules=_any_of(adapter.modules),
            rank_pattern={_any_of(names): rank for rank, names in ranks.items()},
            alpha_pattern={_any_of(names): alpha for alpha, names in alphas.items()},
            lora_bias=adapter.has_bias,
            inference_mode=True,
        )
        inject_adapter_in_model(config, self._module, adapter_name=slot.name)
        self._module.requires_grad_(False)
        self._module.eval()
        self._hook_layers()

    def unload(self, name: str) -> None:
        """Free an adapter's memory. Its emptied parameters are kept for the next adapter of the same form."""
        if name not in self._loaded:
            loaded = ", ".join(self._loaded) or "none"
            raise InvalidRequest(f"lora_name={name!r} is not loaded; loaded: {loaded}", field="lora_name")
        slot = self._loaded.pop(name).slot
        for parameter, empty in slot.parameters:
            parameter.data = empty
        self._free.append(slot)

    def identity(self, name: str | None) -> int:
        """Return a number that is unique for each adapter ever loaded, 0 for none; part of the cache's key."""
        return 0 if name is None else self._loaded[name].number

    @contextmanager
    def using(self, names: list[str | None], tokens_per_row: int) -> Iterator[None]:
        """Within the context, make row ``i`` of each forward pass use the adapter ``names[i]``."""
        self._rows = [NO_ADAPTER if name is None else self._loaded[name].slot.name for name in names]
        self._tokens_per_row = tokens_per_row
        yield

    def _hook_layers(self) -> None:
        def choose(
            layer: object, args: Sequence[object], kwargs: dict[str, object]
        ) -> tuple[object, dict[str, object]]:
            names, states = self._rows, args[0]
            if isinstance(states, torch.Tensor) and len(states) == len(names) * self._tokens_per_row != len(names):
                # Some models join rows for their MLP: shape (rows * tokens, width).
                names = [name for name in names for _ in range(self._tokens_per_row)]
            return args, {**kwargs, "adapter_names": names}

        self._find_wrapped()
        for layer in self._wrapped.values():
            if layer not in self._hooked:
                layer.register_forward_pre_hook(choose, with_kwargs=True)
                self._hooked.add(layer)

    def _remove(self, name: str) -> None:
        for layer in self._find_wrapped():
            layer.delete_adapter(name)
        if hasattr(self._module, "peft_config"):
            self._module.peft_config.pop(name, None)

    def _find_wrapped(self) -> list[LoraLayer]:
        """Find the layers that peft has wrapped, and remember them."""
        from peft.tuners.lora import LoraLayer

        self._wrapped, found = {}, list[LoraLayer]()
        for name, layer in self._module.named_modules():
            if isinstance(layer, LoraLayer):
                self._wrapped[name] = self._module.get_submodule(name)
                found.append(layer)
        return found

    def _unwrap(self, names: Iterable[str]) -> None:
        """Restore layers that peft wrapped."""
        for name in names:
            parent, _, own = name.rpartition(".")
            setattr(self._module.get_submodule(parent), own, self._module.get_submodule(name).base_layer)
        self._find_wrapped()

    def _weight(self, name: str) -> torch.Tensor:
        """Return one of the model's weights, by its checkpoint name."""
        layer = self._module.get_submodule(self._names.own(name.removesuffix(".weight")))
        weight = getattr(layer, "base_layer", layer).weight
        assert isinstance(weight, torch.Tensor)
        return weight.detach()


def _any_of(names: Iterable[str]) -> str:
    """Return a regex for exactly these names: peft would also match a pattern after each dot of a longer name."""
    return f"(?<!.)(?:{'|'.join(map(re.escape, names))})"


def adaptable_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return shapes ``[outputs, inputs]`` of the weights that peft can adapt per row.

    Linear layers of single experts are left out: they see the tokens that a router chose, of any row.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in module.named_modules():
        if re.search(r"(^|\.)experts\.\d+\.", name):
            continue
        if isinstance(layer, nn.Linear | nn.Embedding):
            shapes[f"{name}.weight"] = tuple(layer.weight.shape)
        elif isinstance(layer, Conv1D):
            shapes[f"{name}.weight"] = tuple(reversed(layer.weight.shape))
    return shapes


def _form(adapter: LoraAdapter) -> Hashable:
    """Return what an adapter's parameters depend on, besides their values."""
    return adapter.has_bias, tuple(
        (name, module.rank, module.scale, module.is_embedding) for name, module in adapter.modules.items()
    )


def _fill(slot: _Slot, adapter: LoraAdapter) -> None:
    """Give an adapter's tensors to the parameters of its slot; tensors that are not the engine's own are copied."""
    copies = not adapter.given.is_own
    for (parameter, empty), value in zip(slot.parameters, _values(adapter), strict=True):
        if value is None:
            parameter.data = torch.zeros(parameter.shape, dtype=empty.dtype, device=empty.device)
        elif copies or value.dtype != empty.dtype or value.device != empty.device:
            parameter.data = value.to(empty.device, empty.dtype, copy=copies, memory_format=torch.contiguous_format)
        else:
            parameter.data = value


def _values(adapter: LoraAdapter) -> Iterator[torch.Tensor | None]:
    """Yield A, B and, if the adapter has biases, the bias of each layer; None: zeros."""
    has_bias = adapter.has_bias
    for own in adapter.modules.values():
        yield own.a
        yield own.b
        if has_bias and not own.is_embedding:
            yield own.bias


def _parameters(layer: nn.Module, name: str, own: LoraModule) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters of an adapter in a layer that peft wrapped, with empty tensors like the layer's weight."""
    empty = layer.get_parameter("base_layer.weight").data.new_empty(0)
    if own.is_embedding:
        yield _dict_of(layer, "lora_embedding_A", nn.ParameterDict)[name], empty
        yield _dict_of(layer, "lora_embedding_B", nn.ParameterDict)[name], empty
        return
    b = _part(layer, "lora_B", name)
    yield _part(layer, "lora_A", name).weight, empty
    yield b.weight, empty
    if b.bias is not None:
        yield b.bias, empty


def _dict_of(layer: nn.Module, part: str, kind: type[_D]) -> _D:
    found = getattr(layer, part)
    assert isinstance(found, kind)
    return found


def _part(layer: nn.Module, part: str, name: str) -> nn.Linear:
    """Return one of peft's matrices."""
    linear = _dict_of(layer, part, nn.ModuleDict)[name]
    assert isinstance(linear, nn.Linear)
    return linear
