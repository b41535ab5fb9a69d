"""Names of the layers of a model with a vision or audio part that adapters may use, and the layers they change.

Only layers of the language model can be adapted per row: those of the other parts see patches of images or
frames of sounds, of any row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from drivetrain_weight_sync.receiver.lora_adapters import LoraAdapter
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Shapes ``[outputs, inputs]`` of weights that an adapter can change, under each way to name them."""

    in_memory: Shapes
    """Under the module's own names."""
    stored: Shapes
    """Under the checkpoint's names; empty for models of one part, which need no other names."""
    modules: Mapping[str, str]
    """Own names of the layers by those of the checkpoint."""

    @classmethod
    def of(cls, module: PreTrainedModel, shapes: Shapes) -> AdapterNames:
        """Return the names for a model, of whose layers ``shapes`` lists those that can be adapted."""
        if all(getattr(module.config, part, None) is None for part in ("vision_config", "audio_config")):
            return cls(shapes, {}, {})
        model: Any = module
        parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if isinstance(part, nn.Module)]
        language = {id(parameter) for part in parts for parameter in part.parameters()}
        parameters = dict(module.named_parameters())
        own = {name: shape for name, shape in shapes.items() if id(parameters.get(name)) in language}
        in_memory = {_storage(parameter): name for name, parameter in parameters.items() if name in own}
        names = {
            name: in_memory[_storage(tensor)]
            for name, tensor in by_checkpoint_name(module, parameters).items()
            if _storage(tensor) in in_memory
        }
        stored = {name: own[found] for name, found in names.items()}
        layers = {name.removesuffix(".weight"): found.removesuffix(".weight") for name, found in names.items()}
        return cls(own, stored, layers)

    @property
    def namings(self) -> list[Shapes]:
        """The shapes under each way to name them."""
        return [self.in_memory, self.stored] if self.stored else [self.in_memory]

    def own(self, layer: str) -> str:
        """Return the module's own name of a layer."""
        return layer if f"{layer}.weight" in self.in_memory else self.modules.get(layer, layer)

    def renamed(self, adapter: LoraAdapter) -> LoraAdapter:
        """Return the adapter with the module's own names of its layers."""
        return replace(adapter, modules={self.own(layer): found for layer, found in adapter.modules.items()})


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage
