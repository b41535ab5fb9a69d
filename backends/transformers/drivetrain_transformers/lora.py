"""LoRA adapters, loaded into the model by peft and selected per row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drivetrain.errors import InvalidRequest
from drivetrain_transformers.adapter_names import AdapterNames
from drivetrain_weight_sync.receiver.lora_adapters import LoraAdapter, LoraModule, named_alike, read_adapter

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

NO_ADAPTER = "__base__"
"""peft's own name for a row that uses no adapter."""

_HONOURED: Final = frozenset({"lora_bias", "fan_in_fan_out"})
"""Fields of ``adapter_config.json`` that peft applies per row, beyond those of plain LoRA."""


class Adapters:
    """The adapters of one model. Rows of a batch may use different ones, or none.

    Args:
        module: The model.
        largest_rank: Largest rank of an adapter; None: no limit.
    """

    def __init__(self, module: PreTrainedModel, *, largest_rank: int | None) -> None:
        self._module = module
        self._largest_rank = largest_rank
        self._loaded: dict[str, int] = {}
        self._loads = 0
        self._rows: list[str] = []
        self._tokens_per_row = 1
        self._hooked: set[nn.Module] = set()
        self._names = AdapterNames.of(module, _shapes(module))

    def read(self, path: str) -> LoraAdapter:
        """Read an adapter from a peft folder. Safe from any thread while the weights do not change.

        Raises:
            InvalidRequest: its rank is too large, or the folder holds no LoRA adapter of this model.
        """
        shapes = named_alike(path, self._names.namings)
        return self._names.renamed(read_adapter(path, self._largest_rank, shapes, honours=_HONOURED, base=self._weight))

    def load(self, name: str, adapter: LoraAdapter) -> None:
        """Add an adapter to the model.

        Raises:
            InvalidRequest: the name is taken, or peft cannot adapt one of the layers.
        """
        from peft import LoraConfig, inject_adapter_in_model

        if name in self._loaded:
            raise InvalidRequest(f"lora_name={name!r} is loaded already; unload it first", field="lora_name")
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
        wrapped = set(self._wrapped())
        try:
            inject_adapter_in_model(config, self._module, adapter_name=name)
            for module, own in adapter.modules.items():
                _fill(self._module.get_submodule(module), name, own)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
            self._remove(name)
            self._unwrap(set(self._wrapped()) - wrapped)
            raise InvalidRequest(f"peft cannot load {str(adapter.path)!r}: {error}", field="lora_path") from error
        self._module.requires_grad_(False)
        self._module.eval()
        self._loads += 1
        self._loaded[name] = self._loads
        self._hook_layers()

    def unload(self, name: str) -> None:
        """Remove an adapter from the model."""
        if name not in self._loaded:
            loaded = ", ".join(self._loaded) or "none"
            raise InvalidRequest(f"lora_name={name!r} is not loaded; loaded: {loaded}", field="lora_name")
        self._remove(name)
        del self._loaded[name]

    def identity(self, name: str | None) -> int:
        """Return a number that is unique for each adapter ever loaded, 0 for none; part of the cache's key."""
        return 0 if name is None else self._loaded[name]

    @contextmanager
    def using(self, names: list[str | None], tokens_per_row: int) -> Iterator[None]:
        """Within the context, make row ``i`` of each forward pass use the adapter ``names[i]``."""
        self._rows = [name or NO_ADAPTER for name in names]
        self._tokens_per_row = tokens_per_row
        yield

    def _hook_layers(self) -> None:
        from peft.tuners.lora import LoraLayer

        def choose(
            layer: object, args: Sequence[object], kwargs: dict[str, object]
        ) -> tuple[object, dict[str, object]]:
            names, states = self._rows, args[0]
            if isinstance(states, torch.Tensor) and len(states) == len(names) * self._tokens_per_row != len(names):
                # Some models join rows for their MLP: shape (rows * tokens, width).
                names = [name for name in names for _ in range(self._tokens_per_row)]
            return args, {**kwargs, "adapter_names": names}

        for layer in self._module.modules():
            if isinstance(layer, LoraLayer) and layer not in self._hooked:
                layer.register_forward_pre_hook(choose, with_kwargs=True)
                self._hooked.add(layer)

    def _remove(self, name: str) -> None:
        for layer in self._wrapped().values():
            layer.delete_adapter(name)
        if hasattr(self._module, "peft_config"):
            self._module.peft_config.pop(name, None)

    def _wrapped(self) -> dict[str, LoraLayer]:
        """Return the layers that peft has wrapped, by name."""
        from peft.tuners.lora import LoraLayer

        return {name: layer for name, layer in self._module.named_modules() if isinstance(layer, LoraLayer)}

    def _unwrap(self, names: Iterable[str]) -> None:
        """Restore layers that peft wrapped."""
        for name in names:
            parent, _, own = name.rpartition(".")
            setattr(self._module.get_submodule(parent), own, self._module.get_submodule(name).base_layer)

    def _weight(self, name: str) -> torch.Tensor:
        """Return one of the model's weights, by its checkpoint name."""
        layer = self._module.get_submodule(self._names.own(name.removesuffix(".weight")))
        weight = getattr(layer, "base_layer", layer).weight
        assert isinstance(weight, torch.Tensor)
        return weight.detach()


def _any_of(names: Iterable[str]) -> str:
    """Return a regex for exactly these names: peft would also match a pattern after each dot of a longer name."""
    return f"(?<!.)(?:{'|'.join(map(re.escape, names))})"


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
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


@torch.no_grad()
def _fill(layer: nn.Module, name: str, own: LoraModule) -> None:
    """Copy an adapter's tensors into the layer that peft wrapped."""
    if own.is_embedding:
        layer.get_parameter(f"lora_embedding_A.{name}").copy_(own.a)
        layer.get_parameter(f"lora_embedding_B.{name}").copy_(own.b)
        return
    a, b = _part(layer, "lora_A", name), _part(layer, "lora_B", name)
    a.weight.copy_(own.a)
    b.weight.copy_(own.b)
    if b.bias is not None:
        b.bias.zero_() if own.bias is None else b.bias.copy_(own.bias)


def _part(layer: nn.Module, part: str, name: str) -> nn.Linear:
    """Return one of peft's matrices; ``name`` may contain dots."""
    found = layer.get_submodule(part)
    assert isinstance(found, nn.ModuleDict)
    linear = found[name]
    assert isinstance(linear, nn.Linear)
    return linear
