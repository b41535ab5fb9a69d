# pyright: reportMissingImports=false
"""Layers that SGLang quantised or packed after loading, from what their parameters were when the model was made.

SGLang keeps no record of it: quantisation replaces a layer's parameters by others, without the loaders of the first.
"""

from __future__ import annotations

from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drivetrain_weight_sync.tensors.block_quantisation import quantise_blocks
from drivetrain_weight_sync.tracing.loader_trace import LoadWeights
from drivetrain_weight_sync.tracing.quantised_parts import LayerForm, QuantisedParts, as_of

_RECORDED: Final[WeakKeyDictionary[nn.Module, dict[nn.Module, LayerForm]]] = WeakKeyDictionary()
"""For each model, the forms of its layers before loading."""


def register() -> None:
    """Record the layers of each model that SGLang makes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.loader._initialize_model", record, HookType.AFTER)


def record(model: nn.Module, *_: object, **__: object) -> None:
    """Record the parameters of a model's layers before anything is loaded."""
    _RECORDED[model] = {
        layer: LayerForm.of(layer) for layer in model.modules() if getattr(layer, "quant_method", None) is not None
    }


def quantised_layers(model: nn.Module, dtype: torch.dtype, load_weights: LoadWeights) -> QuantisedParts:
    """Return the layers whose parameters differ from those that they were made with, or came quantised in blocks.

    Args:
        model: SGLang's model.
        dtype: Dtype in which SGLang loads it.
        load_weights: Loads tensors as SGLang loads a checkpoint.
    """
    recorded = _RECORDED.get(model, {})
    blocks = {layer: found for layer, form in recorded.items() if (found := _block_scales(layer, form))}

    def quantise(layer: nn.Module) -> None:
        method: Any = layer.quant_method
        form = recorded[layer]
        for name, scale in blocks.get(layer, {}).items():
            held = layer._parameters[name]
            assert held is not None
            quantised, scales = quantise_blocks(held.data, method.quant_config.weight_block_size)
            for of, made in ((name, quantised), (scale, scales)):
                layer.register_parameter(of, cast("nn.Parameter", as_of(made, form.parameters[of])))

    def convert(layer: nn.Module) -> None:
        method: Any = layer.quant_method
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            method.process_weights_after_loading(layer)
        finally:
            torch.set_default_dtype(before)

    forms = {
        layer: form.before_quantisation(blocks[layer], dtype) if layer in blocks else form
        for layer, form in recorded.items()
    }
    return QuantisedParts(forms, convert, load_weights, quantise=quantise, loaded=recorded)


def _block_scales(layer: nn.Module, form: LayerForm) -> dict[str, str]:
    """Return the parameter of the scales of each weight that SGLang loads in fp8 with a scale for each block."""
    block = getattr(getattr(layer.quant_method, "quant_config", None), "weight_block_size", None)
    if block is None:
        return {}
    found = {name: f"{name}_scale_inv" for name, held in form.parameters.items() if held.dtype == torch.float8_e4m3fn}
    scales = [form.parameters.get(scale) for scale in found.values()]
    return found if all(scale is not None and scale.dtype == torch.float32 for scale in scales) else {}
