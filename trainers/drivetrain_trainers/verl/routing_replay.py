"""The experts of a rollout, which verl's trainer replays: ``rollout.enable_rollout_routing_replay``."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.backend.toolkit.expert_layers import ExpertLayers
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import Completion

_NEEDED: Final = (Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS)
_SWITCH: Final = "enable_return_routed_experts"
"""The argument of SGLang and vLLM that makes them record experts, which verl's own rollouts set, too."""
ASKED: Final = {"return_routed_experts": True, "return_prompt_routed_experts": True}
"""Sampling parameters of a request whose experts are replayed."""


def recording_engine(config: EngineConfig) -> InferenceEngine:
    """Make an engine that returns the experts of all tokens. Engines that record them on demand are told to.

    Raises:
        UnsupportedCapability: The engine does not return them; names the capability that is missing.
    """
    engine = create_engine(config)
    if not engine.capabilities.issuperset(_NEEDED) and not config.engine_kwargs.get(_SWITCH):
        switched = {**config.engine_kwargs, _SWITCH: True}
        engine = create_engine(config.model_copy(update={"engine_kwargs": switched}))
    for capability in _NEEDED:
        if capability not in engine.capabilities:
            raise UnsupportedCapability(
                f"actor_rollout_ref.rollout.enable_rollout_routing_replay=True: the {config.backend} backend does not "
                f"claim {capability.value} for this model and device; set it to false",
                capability=capability.value,
            )
    return engine


def replayed_experts(completion: Completion, layers: ExpertLayers) -> NDArray[np.int16] | None:
    """Return the experts of the prompt's and the response's tokens in their order, without the last token's.

    The last token is drawn and not read, so it has no experts. Their shape is (tokens, layers of the model, experts per
    token), with zeros for layers without experts, as verl's own rollouts return them.

    Returns:
        None if the request was aborted before its prompt was read.
    """
    of_output, of_prompt = completion.routed_experts, completion.prompt_routed_experts
    if not of_output or of_prompt is None:
        return None
    return layers.in_all_layers(of_prompt[:-1] + of_output).astype(np.int16)
