"""The experts of a sample's tokens in all layers, as slime and SkyRL replay them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from drivetrain.backend.toolkit.model_folder import levels_in, model_file
from drivetrain.errors import UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import Completion
from drivetrain.types.routed_experts import RoutedExperts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def expert_params(start: int, prompt_length: int) -> Mapping[str, object]:
    """Return sampling parameters that ask for the experts from token ``start`` of the prompt on.

    The engine's experts of the output begin with those of the prompt's last token.
    """
    return {"return_routed_experts": True, "return_prompt_routed_experts": start < prompt_length - 1}


class PackedExperts:
    """Gives experts the form of SGLang and SkyRL. ``config.json`` is read once, when it is first needed.

    Args:
        config: The engine's configuration, which names the model.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def of(self, completion: Completion, start: int) -> str | None:
        """Return the experts as SGLang packs them: base64 of int32, little-endian; else as :meth:`array`."""
        experts = self.array(completion, start)
        return None if experts is None else b64encode(experts.astype("<i4").tobytes()).decode()

    def array(self, completion: Completion, start: int) -> NDArray[np.integer] | None:
        """Return the experts of all tokens from ``start`` on but the last: (tokens, layers, experts per token).

        A layer without experts has zeros, as in SGLang and vLLM.

        Returns:
            None if the request was aborted before its prompt was read.

        Raises:
            UnsupportedCapability: Some layers have no experts, and ``config.json`` does not say which.
        """
        last = len(completion.prompt_token_ids) - 1
        of_output, of_prompt = completion.routed_experts, completion.prompt_routed_experts
        if of_output is None or (start < last and of_prompt is None):
            return None
        experts = of_output[start - last :] if of_prompt is None else of_prompt[start:last] + of_output
        return self._in_all_layers(experts)

    @cached_property
    def _fields(self) -> Mapping[str, object]:
        """Fields of ``config.json``; those of the language model win."""
        levels = levels_in(model_file(self._config, "config.json"))
        return {name: value for level in levels for name, value in level.items()}

    def _in_all_layers(self, experts: RoutedExperts) -> NDArray[np.integer]:
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
