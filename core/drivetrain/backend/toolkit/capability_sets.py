"""Capabilities that engines mostly have together, for :meth:`drivetrain.Backend.capabilities`.

An engine that lacks a member of a set subtracts it: ``LOGPROBS - {Capability.PROMPT_LOGPROBS}``.
"""

from __future__ import annotations

from typing import Final

from drivetrain.types.capability import Capability

LOGPROBS: Final = frozenset(
    {
        Capability.LOGPROBS_RAW,
        Capability.LOGPROBS_TEMPERATURE,
        Capability.LOGPROBS_PROCESSED,
        Capability.TOP_LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.SCORE_TOKENS,
    }
)
STOPS: Final = frozenset({Capability.STOP_TOKEN_IDS, Capability.IGNORE_EOS, Capability.MIN_NEW_TOKENS})
"""Stops on tokens. :class:`drivetrain.InferenceEngine` adds stop strings and stop regexes itself."""
SAMPLING: Final = frozenset(
    {
        Capability.TOP_K,
        Capability.TOP_P,
        Capability.MIN_P,
        Capability.REPETITION_PENALTY,
        Capability.FREQUENCY_PENALTY,
        Capability.PRESENCE_PENALTY,
        Capability.LOGIT_BIAS,
        Capability.LOGIT_PROCESSORS,
        Capability.SEED,
    }
)
STRUCTURED_OUTPUT: Final = frozenset(
    {Capability.STRUCTURED_JSON, Capability.STRUCTURED_REGEX, Capability.STRUCTURED_EBNF}
)
FREEZING: Final = frozenset(
    {
        Capability.PAUSE_IN_PLACE,
        Capability.PAUSE_RETRACT,
        Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE,
        Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    }
)
"""Requests can be frozen in both modes, and weights can change meanwhile."""
RECEIVED_WEIGHTS: Final = frozenset(
    {
        Capability.WEIGHTS_SHARED_MEMORY,
        Capability.WEIGHTS_BROADCAST,
        Capability.WEIGHTS_DISK,
        Capability.WEIGHTS_PLUGIN,
        Capability.WEIGHT_STAGING,
        Capability.VERSION_SPANS,
        Capability.READ_WEIGHTS,
        Capability.SAVE_SHARDED,
    }
)
"""Weight updates through the receiver of ``drivetrain_weight_sync``, in one process of the engine or several."""
