# pyright: reportMissingImports=false
"""Layers that SGLang quantised or packed after loading, from what their parameters were when the model was made.

SGLang keeps no record of it: quantisation replaces a layer's parameters by others, without the loaders of the first.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drivetrain_weight_sync.tracing.loader_trace import LoadWeights
from drivetrain_weight_sync.tracing.quantised_parts import LayerForm, QuantisedParts

_RECORDED: Final[WeakKeyDictionary[nn.Module, dict[nn.Module, LayerForm]]] = WeakKeyDictionary()
"""For each model, the forms of its layers before loading."""


def register() -> None:
    """Record the layers of each model that SGLang makes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.loader._initialize_model", _record, HookType.AFTER)


def _record(model: nn.Module, *_: object, **__: object) -> None:
    _RECORDED[model] = {
        layer: LayerForm.of(layer) for layer in model.modules() if getattr(layer, "quant_method", None) is not None
    }


def quantised_layers(model: nn.Module, dtype: torch.dtype, load_weights: LoadWeights) -> QuantisedParts:
    """Return the layers whose parameters differ from those that they were made with.

    Args:
        model: SGLang's model.
        dtype: Dtype in which SGLang loads it.
        load_weights: Loads tensors as SGLang loads a checkpoint.
    """

    def convert(layer: nn.Module) -> None:
        method: Any = layer.quant_method
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            method.process_weights_after_loading(layer)
        finally:
            torch.set_default_dtype(before)

    return QuantisedParts(_RECORDED.get(model, {}), convert, load_weights)
