"""Parts that several responses of vLLM's have: stop reasons, and logprobs of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, cast

from drivetrain.openai.choices import json_logprob, usage
from drivetrain.openai.responses import Usage
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.types.outputs import Completion, FinishReason, TopLogprobs
from drivetrain_serving.vllm.answer_types import (
    Absent,
    ChatChunk,
    ChatUsageChunk,
    DetailedUsage,
    PromptLogprobs,
    RankedLogprob,
    RunningUsage,
)

Json = dict[str, Any]
"""JSON whose form is not known here."""


def stop_reason(completion: Completion, eos_token_ids: Sequence[int]) -> int | str | None:
    """Return what ended the completion: a stop string or token id; None for EOS, and where nothing matched."""
    if completion.finish_reason is not FinishReason.STOP or completion.matched_stop in eos_token_ids:
        return None
    return completion.matched_stop


def prompt_logprobs(completion: Completion, texts: TokenTexts) -> PromptLogprobs:
    """Return a prompt's logprobs: per token, token id → logprob, rank and text; the prompt's own token first."""
    given = completion.prompt_logprobs
    if given is None:
        return None
    tops: Sequence[TopLogprobs | None] = completion.prompt_top_logprobs or [None] * len(given)
    ranks: Sequence[int | None] = completion.prompt_ranks or [None] * len(given)
    return [
        None if logprob is None else _ranked(token_id, logprob, rank, top or [], texts)
        for token_id, logprob, rank, top in zip(completion.prompt_token_ids, given, ranks, tops, strict=True)
    ]


def _ranked(
    token_id: int, logprob: float, rank: int | None, top: TopLogprobs, texts: TokenTexts
) -> dict[str, RankedLogprob]:
    entries = {str(other): _entry(value, place, texts(other).text) for place, (other, value) in enumerate(top, 1)}
    own = entries.pop(str(token_id), None) or _entry(logprob, rank, texts(token_id).text)
    return {str(token_id): own, **entries}


def _entry(logprob: float, rank: int | None, text: str) -> RankedLogprob:
    return {"logprob": json_logprob(logprob), "rank": rank, "decoded_token": text}


ABSENT: Final[Absent] = {
    "ec_transfer_params": None,
    "kv_transfer_params": None,
    "metrics": None,
    "service_tier": None,
    "system_fingerprint": None,
}


def usage_of(completions: Sequence[Completion]) -> DetailedUsage:
    """Return the token counts of a call, with vLLM's details."""
    return with_details(usage(completions))


def with_details(counts: Usage) -> DetailedUsage:
    """Add the details that vLLM writes to token counts."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "completion_tokens": counts["completion_tokens"],
        "total_tokens": counts["total_tokens"],
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def final_usage(chunk: ChatChunk | ChatUsageChunk) -> DetailedUsage | None:
    """Return the usage of a stream's last chunk, which has no choices; None for another chunk."""
    return None if chunk["choices"] else cast(ChatUsageChunk, chunk)["usage"]


class RunningUsages:
    """Counts the tokens of a stream's choices, for clients that want the usage in each chunk.

    Args:
        wanted: False if the client does not.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._sampled: Counter[int] = Counter()

    def after(self, index: int, token_ids: Sequence[int], prompt_token_ids: Sequence[int]) -> RunningUsage | None:
        """Return the usage of the choice ``index`` after its next ``token_ids``; None if it is not wanted."""
        self._sampled[index] += len(token_ids)
        if not self._wanted:
            return None
        prompt, sampled = len(prompt_token_ids), self._sampled[index]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }
