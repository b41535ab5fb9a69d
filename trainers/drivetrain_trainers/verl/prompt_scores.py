"""Logprobs of a prompt's tokens, which verl's distillation asks a teacher for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion
from drivetrain.types.prompts import TokenPrompt
from drivetrain.types.sampling import SamplingParams

PROMPT_LOGPROBS = "prompt_logprobs"
"""verl's sampling parameter: the number of most likely tokens at each position; 0 for the prompt's own tokens."""


def top_k_of(asked: object) -> int | None:
    """Return the number of most likely tokens that a request asks for; None if it does not ask for scores.

    Raises:
        InvalidRequest: It is no count.
    """
    if asked is None:
        return None
    if type(asked) is not int or asked < 0:
        raise InvalidRequest(
            f"sampling_params.{PROMPT_LOGPROBS}={shown(asked)}: expected a number of most likely tokens, or 0 for the "
            "logprobs of the prompt's own tokens",
            field=f"sampling_params.{PROMPT_LOGPROBS}",
        )
    return asked


async def scored(
    engine: InferenceEngine, prompt: TokenPrompt, params: SamplingParams, top_k: int, lora: str | None
) -> Completion:
    """Sample a response, and score its prompt in the same request, by the model's own distribution.

    Args:
        engine: The engine.
        prompt: The prompt. Only a request that asks for ``prompt_logprobs`` scores one with images.
        params: The response's sampling params.
        top_k: Number of most likely tokens at each position.
        lora: Name of the adapter to use; None: the base model.
    """
    if prompt.media or not engine.supports(Capability.SCORE_AT):
        params = params.model_copy(update={PROMPT_LOGPROBS: top_k})
        return (await engine.generate([prompt], params, lora=lora)).completions[0]
    output = await engine.compute_logprobs(
        [prompt.token_ids], temperature=1.0, top_k=top_k, sampling_params=params, lora=lora
    )
    return output.completions[0]


def score_fields(completion: Completion, top_k: int) -> dict[str, NDArray[np.generic]]:
    """Return ``extra_fields`` of a scored response: ``prompt_ids``, int32, and ``prompt_logprobs``, float32.

    Both have the shape (tokens, max(top_k, 1)). Row ``i`` is of the token that follows the prompt's token ``i``: the
    ``top_k`` most likely ones, likeliest first, or the prompt's own next token. The last row is 0, as in verl's own
    rollouts. A response that was aborted before its prompt was read has neither.
    """
    found = _rows(completion, top_k)
    if found is None:
        return {}
    ids, logprobs = (np.zeros((len(completion.prompt_token_ids), max(top_k, 1)), kind) for kind in ("i4", "f4"))
    ids[:-1], logprobs[:-1] = found
    return {"prompt_ids": ids, PROMPT_LOGPROBS: logprobs}


_Rows = tuple[NDArray[np.int32] | Sequence[object], NDArray[np.float32] | Sequence[object]]


def _rows(completion: Completion, top_k: int) -> _Rows | None:
    """Return ids and logprobs of the prompt's tokens after the first."""
    own = np.array(completion.prompt_token_ids[1:], dtype=np.int32)[:, None]
    if (scores := completion.scores) is not None:
        return (scores.top_ids[1:], scores.top_logprobs[1:]) if top_k else (own, scores.token_logprobs[1:, None])
    if completion.prompt_logprobs is None:
        return None
    if not top_k:
        return own, np.array(completion.prompt_logprobs[1:], dtype=np.float32)[:, None]
    tops = np.array((completion.prompt_top_logprobs or [None])[1:], dtype=np.float64).reshape(-1, top_k, 2)
    return tops[..., 0].astype(np.int32), tops[..., 1].astype(np.float32)
