"""Recurrent states of rows, which Mamba layers, linear attention and short convolutions keep instead of a KV cache.

A state is one tensor of shape (rows, …) for rows of any length; it cannot be cut back to an earlier token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

RecurrentLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
"""transformers' class of such a layer. In releases whose cache has none, models keep their states in other ways."""
_KINDS = ("conv", "recurrent")


class Slot(NamedTuple):
    """Place of one state in a cache."""

    layer: int
    kind: str
    """``"conv"``, the last inputs of a convolution, or ``"recurrent"``, the sum over all tokens."""
    number: int
    """Number of the state in its layer."""


States = Mapping[Slot, torch.Tensor]


def is_recurrent(layer: object) -> bool:
    """Return whether a cache's layer keeps recurrent states, beside keys and values or alone."""
    # Older releases hold one tensor instead of a dict.
    return isinstance(layer, RecurrentLayer) and isinstance(getattr(layer, "conv_states", None), dict)


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache for a model with recurrent states; its sliding windows keep every token."""
    cache = DynamicCache(config=config)
    cache.layers = [_without_window(layer) for layer in cache.layers]
    return cache


def _without_window(layer: Any) -> Any:
    if not getattr(layer, "is_sliding", False):
        return layer
    if not is_recurrent(layer):
        return DynamicLayer()
    return cache_utils.LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)


def states_of(cache: Cache) -> dict[Slot, torch.Tensor]:
    """Return the states of a cache that a forward pass has filled."""
    return {
        Slot(place, kind, number): state
        for place, layer in enumerate(cache.layers)
        if is_recurrent(layer)
        for kind in _KINDS
        for number, state in getattr(layer, f"{kind}_states").items()
        if state is not None
    }


def put_states(layers: Sequence[Any], states: States) -> None:
    """Put ``states`` into a cache's layers. A forward pass updates them in place."""
    for (place, kind, number), state in states.items():
        layer = layers[place]
        getattr(layer, f"{kind}_states")[number] = state
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        layer.device, layer.dtype = state.device, state.dtype
        if kind == "conv":
            layer.conv_kernel_size[number] = state.shape[-1]


def concatenated(states: Iterable[States]) -> dict[Slot, torch.Tensor]:
    """Concatenate the states of several rows into the states of one batch."""
    together = list(states)
    return {slot: torch.cat([each[slot] for each in together]) for slot in together[0]}
