"""Place the experts of a sample in all layers of its model, as trainers replay them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from drivetrain.backend.toolkit.model_folder import levels_in, model_file
from drivetrain.errors import UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.routed_experts import RoutedExperts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ExpertLayers:
    """Knows which layers of a model have experts. ``config.json`` is read once, when it is first needed.

    Args:
        config: The engine's configuration, which names the model.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def in_all_layers(self, experts: RoutedExperts) -> NDArray[np.uint8 | np.uint16]:
        """Return the ids of experts, shape (tokens, layers of the model, experts per token).

        A layer without experts has zeros, as in SGLang's and vLLM's own results.

        Raises:
            UnsupportedCapability: Some layers have no experts, and ``config.json`` does not say which.
        """
        import numpy as np

        ids, layers = experts.to_numpy(), self._fields.get("num_hidden_layers")
        if not len(experts) or not isinstance(layers, int) or layers == experts.layers:
            return ids
        sparse = layers_with_experts(self._fields, layers)
        if len(sparse) != experts.layers:
            raise UnsupportedCapability(
                f"return_routed_experts=True: {experts.layers} of the model's {layers} layers have experts, and its "
                "config.json does not say which; leave it out",
                capability=Capability.ROUTED_EXPERTS.value,
            )
        placed = np.zeros((len(experts), layers, experts.experts_per_token), dtype=ids.dtype)
        placed[:, sparse] = ids
        return placed

    @cached_property
    def _fields(self) -> Mapping[str, object]:
        """Fields of ``config.json``; those of the language model win."""
        levels = levels_in(model_file(self._config, "config.json"))
        return {name: value for level in levels for name, value in level.items()}


def layers_with_experts(fields: Mapping[str, object], layers: int) -> Sequence[int]:
    """Return the numbers of the layers that have experts, by the fields of a ``config.json``.

    Args:
        fields: Fields of the language model.
        layers: Number of its layers.
    """
    kinds = fields.get("mlp_layer_types")
    if isinstance(kinds, list):
        return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    first, dense = fields.get("first_k_dense_replace"), fields.get("mlp_only_layers")
    every, step = fields.get("moe_layer_freq"), fields.get("decoder_sparse_step")
    return [
        layer
        for layer in range(layers)
        if layer >= (first if isinstance(first, int) else 0)
        and not (isinstance(dense, list) and layer in dense)
        and not (isinstance(step, int) and step and (layer + 1) % step)
        and not (isinstance(every, int) and every and layer % every)
        and not (isinstance(every, list) and not any(every[layer : layer + 1]))
    ]
