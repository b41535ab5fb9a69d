"""What chat completions and completions have in common: usage, endings, the layout of logprobs."""

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
"""Logprob of a token that a mask forbids, as the OpenAI API writes it: JSON has no infinity."""
FINISH_REASON: Final[dict[FinishReason, FinishReasonName]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def usage(completions: Sequence[Completion]) -> Usage:
    """Count the tokens of a call. Prompt tokens count as cached if no sample of the prompt computed them."""
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
    """Return the extras of a choice that has ended."""
    return {
        "weight_version": completion.weight_version,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_versions
        ],
        "matched_stop": completion.matched_stop,
        "logprobs_mode": completion.logprobs_mode.value if completion.logprobs_mode else None,
    }


def json_logprob(logprob: float) -> float:
    """Return a logprob as JSON can hold it: of a token that cannot be drawn it is -9999, as the API writes it.

    Raises:
        EngineInternalError: it is no logprob.
    """
    if math.isfinite(logprob):
        return logprob
    if logprob == -math.inf:
        return IMPOSSIBLE
    raise EngineInternalError(f"the engine returned {logprob} as a logprob; check the weights, and push them again")


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs] | None
) -> ChatLogprobs:
    """Lay out logprobs as chat completions do."""

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
    """Lay out logprobs as completions do: one list for each kind of thing."""
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
    """Most likely first. The token that was sampled is there too; of tokens that read alike none is lost."""
    found: dict[str, float] = {}
    for token_id, logprob in sorted(dict(pairs).items(), key=lambda pair: -pair[1]):
        text = texts(token_id).text
        found[text if text not in found else f"token_id:{token_id}"] = json_logprob(logprob)
    return found
