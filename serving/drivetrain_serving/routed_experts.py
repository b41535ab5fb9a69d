"""The experts of a sample's tokens in all layers, as slime and SkyRL replay them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.backend.toolkit.expert_layers import ExpertLayers
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import Completion

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def expert_params(start: int, prompt_length: int) -> Mapping[str, object]:
    """Return sampling parameters that ask for the experts from token ``start`` of the prompt on.

    The engine's experts of the output begin with those of the prompt's last token.
    """
    return {"return_routed_experts": True, "return_prompt_routed_experts": start < prompt_length - 1}


class PackedExperts:
    """Gives experts the form of SGLang and SkyRL.

    Args:
        config: The engine's configuration, which names the model.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._layers = ExpertLayers(config)

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
        return self._layers.in_all_layers(experts)
