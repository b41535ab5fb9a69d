# pyright: reportMissingImports=false
"""Layers that vLLM quantised or packed after loading, from what vLLM recorded for its own layerwise reload."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain_weight_sync.tracing.loader_trace import LoadWeights
from drivetrain_weight_sync.tracing.quantised_parts import LayerForm, QuantisedParts


def quantised_layers(model: nn.Module, vllm_config: Any, load_weights: LoadWeights) -> QuantisedParts:
    """Return the layers whose parameters differ from those that vLLM recorded before it loaded them.

    Args:
        model: vLLM's model.
        vllm_config: vLLM's configuration.
        load_weights: Loads tensors as vLLM loads a checkpoint.
    """

    def convert(layer: nn.Module) -> None:
        from vllm.config import set_current_vllm_config

        # vLLM's quantisation of a layer returns at once if it ran before.
        vars(layer).pop("_already_called_process_weights_after_loading", None)
        method: Any = layer.quant_method
        with set_current_vllm_config(vllm_config):
            method.process_weights_after_loading(layer)

    forms = {layer: form for layer in model.modules() if (form := _recorded(layer)) is not None}
    return QuantisedParts(forms, convert, load_weights)


def _recorded(layer: nn.Module) -> LayerForm | None:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    # Attention is handled as a derived tensor.
    if hasattr(layer, "impl") or not isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
        return None
    as_loaded: dict[str, torch.Tensor] = {}
    for name, tensor in get_layerwise_info(layer).restore_metadata[0].items():
        if name not in SKIP_TENSORS:
            form = LayerForm({name: restore_layer_refs(tensor, layer)}).parameters[name]
            # Skip online quantisation's own loader, which waits until the whole layer has arrived.
            form.weight_loader = _get_original_loader(form)  # type: ignore[attr-defined]
            as_loaded[name] = form
    return LayerForm(as_loaded, kept=SKIP_TENSORS)
