"""Shared parts of chat completions and completions: usage, finish reasons, logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from drivetrain.errors import EngineInternalError
from drivetrain.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    Ending,
    FinishReasonName,
    TokenLogprob,
    Usage,
)
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.types.outputs import Completion, FinishReason, TopLogprobs, group_outputs_by_prompt

IMPOSSIBLE: Final = -9999.0
"""Logprob of a token that a mask forbids, as in the OpenAI API: JSON has no infinity."""
FINISH_REASON: Final[dict[FinishReason, FinishReasonName]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def usage(completions: Sequence[Completion]) -> Usage:
    """Count the tokens of a call.

    A prompt token counts as cached if every sample of the prompt took it from the prefix cache.
    """
    groups = group_outputs_by_prompt(completions)
    prompt = sum(len(group[0].prompt_token_ids) for group in groups)
    generated = sum(len(completion.token_ids) for completion in completions)
    cached = sum(min(completion.cached_tokens for completion in group) for group in groups)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def ending(completion: Completion) -> Ending:
    """Return the non-OpenAI fields of a finished choice."""
    return {
        "weight_version": completion.weight_version,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_versions
        ],
        "matched_stop": completion.matched_stop,
        "logprobs_mode": completion.logprobs_mode.value if completion.logprobs_mode else None,
    }


def json_logprob(logprob: float) -> float:
    """Return a logprob as JSON; -inf, for a token that cannot be drawn, becomes -9999 as in the OpenAI API.

    Raises:
        EngineInternalError: The value is NaN or +inf.
    """
    if math.isfinite(logprob):
        return logprob
    if logprob == -math.inf:
        return IMPOSSIBLE
    raise EngineInternalError(f"the engine returned {logprob} as a logprob; check the weights, and push them again")


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs] | None
) -> ChatLogprobs:
    """Return logprobs in the layout of chat completions."""

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        written = texts(token_id)
        return {"token": written.text, "logprob": json_logprob(logprob), "bytes": written.data}

    most_likely = top if top is not None else [[]] * len(token_ids)
    return {
        "content": [
            {**entry(token_id, logprob), "top_logprobs": [entry(*other) for other in others]}
            for token_id, logprob, others in zip(token_ids, logprobs, most_likely, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[TopLogprobs | None] | None,
    offsets: list[int],
) -> CompletionLogprobs:
    """Return logprobs in the layout of completions: parallel lists of tokens, logprobs and offsets."""
    return {
        "tokens": [texts(token_id).text for token_id in token_ids],
        "token_logprobs": [None if logprob is None else json_logprob(logprob) for logprob in logprobs],
        "top_logprobs": None
        if top is None
        else [
            None if others is None or logprob is None else _by_text(texts, [(token_id, logprob), *others])
            for token_id, logprob, others in zip(token_ids, logprobs, top, strict=True)
        ],
        "text_offset": offsets,
    }


def _by_text(texts: TokenTexts, pairs: TopLogprobs) -> dict[str, float]:
    """Return logprobs by token text, most likely first, including the sampled token.

    If two tokens have the same text, the less likely one is keyed ``token_id:N``.
    """
    found: dict[str, float] = {}
    for token_id, logprob in sorted(dict(pairs).items(), key=lambda pair: -pair[1]):
        text = texts(token_id).text
        found[text if text not in found else f"token_id:{token_id}"] = json_logprob(logprob)
    return found
