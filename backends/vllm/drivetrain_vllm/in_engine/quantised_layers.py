# pyright: reportMissingImports=false
"""Reload layers that vLLM quantised or packed after loading, through vLLM's own layerwise reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts


class QuantisedLayers(QuantisedParts):
    """Layers whose parameters differ from those that vLLM recorded before it loaded them.

    Args:
        model: vLLM's model.
        model_config: vLLM's model configuration.
        load_weights: Loads tensors as vLLM loads a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    ) -> None:
        self._layers = [layer for layer in model.modules() if _is_converted(layer)]
        self._model_config = model_config
        self._load_weights = load_weights
        self._filled: dict[int, nn.Module] = {}
        """Layer by the storage of each tensor that the loader fills; only within :meth:`as_loaded`."""

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Replace the layers' tensors, within the context, by those that vLLM recorded before loading."""
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

        held = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in self._layers]
        transient = [set(layer._non_persistent_buffers_set) for layer in self._layers]
        try:
            for layer in self._layers:
                restore_layer_on_meta(layer, get_layerwise_info(layer))
                for tensor in _without_memory(layer):
                    # Skip online quantisation's own loader, which waits until the whole layer has arrived.
                    tensor.weight_loader = _get_original_loader(tensor)  # type: ignore[attr-defined]
                    self._filled[storage_of(tensor)] = layer
            yield
        finally:
            self._filled = {}
            for (layer, parameters, buffers), names in zip(held, transient, strict=True):
                layer._parameters.clear()
                layer._parameters.update(parameters)
                layer._buffers.clear()
                layer._buffers.update(buffers)
                layer._non_persistent_buffers_set = names

    def part_of(self, destination: torch.Tensor) -> nn.Module:
        """Return the layer that the destination belongs to."""
        return self._filled[storage_of(destination)]

    def load(self, parts: Sequence[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
        """Make vLLM load layers, quantise or pack them, and copy the results to their old addresses."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        methods = [layer.quant_method for layer in parts if hasattr(layer, "quant_method")]
        before = [dict(vars(method)) for method in methods]
        for layer in parts:
            initialize_layerwise_reload(layer)
        try:
            self._load_weights(weights.items())
        finally:
            for layer in parts:
                finalize_layerwise_reload(layer, self._model_config)
        for method, attributes in zip(methods, before, strict=True):
            put_back(method, attributes)


@torch.no_grad()
def put_back(owner: object, before: Mapping[str, object]) -> None:
    """Restore attributes whose objects were made anew, such as kernels, with the new objects' values.

    CUDA graphs read memory at the addresses of the tensors that the old objects hold.

    Args:
        owner: An object with a ``__dict__``.
        before: Its attributes before they were made anew.
    """
    for name, old in before.items():
        new = getattr(owner, name, old)
        if new is not old and type(new) is type(old):
            _take_values(old, new, set())
            setattr(owner, name, old)


def _take_values(old: object, new: object, seen: set[int]) -> None:
    """Copy the tensors and numbers that an object reaches to the same places of its predecessor."""
    if old is new or id(old) in seen or type(old) is not type(new) or isinstance(old, nn.Module):
        return
    seen.add(id(old))
    if isinstance(old, torch.Tensor):
        assert isinstance(new, torch.Tensor)
        if _form(old) == _form(new):
            old.copy_(new)
    elif isinstance(old, dict):
        assert isinstance(new, dict)
        for key in old.keys() & new.keys():
            if isinstance(new[key], bool | int | float):
                old[key] = new[key]
            else:
                _take_values(old[key], new[key], seen)
    elif isinstance(old, list | tuple):
        assert isinstance(new, Sequence)
        for one, other in zip(old, new, strict=False):
            _take_values(one, other, seen)
    elif hasattr(old, "__dict__"):
        _take_values(vars(old), vars(new), seen)


def _without_memory(layer: nn.Module) -> list[torch.Tensor]:
    held = (*layer._parameters.values(), *layer._buffers.values())
    return [tensor for tensor in held if tensor is not None and tensor.is_meta]


def _is_converted(layer: nn.Module) -> bool:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    if hasattr(layer, "impl"):  # attention is handled as a derived tensor
        return False
    as_loaded = get_layerwise_info(layer).restore_metadata[0]
    held = {
        name: parameter
        for name, parameter in layer._parameters.items()
        if parameter is not None and name not in SKIP_TENSORS
    }
    return {name: _form(tensor) for name, tensor in held.items()} != {
        name: _form(tensor) for name, tensor in as_loaded.items() if name not in SKIP_TENSORS
    }


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    # A difference in strides alone needs no conversion: a copy handles it.
    return tensor.dtype, tuple(tensor.shape)
