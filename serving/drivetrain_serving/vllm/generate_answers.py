"""Responses to ``/inference/v1/generate``: token ids and their logprobs, without text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from drivetrain.openai.choices import FINISH_REASON, json_logprob
from drivetrain.openai.responses import WeightSpan
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.types.outputs import Completion, CompletionChunk, TopLogprobs
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.vllm.json_objects import RunningUsages, prompt_logprobs, stop_reason, usage_of
from drivetrain_serving.vllm.payloads import GenerateRequest


class GenerateResponses:
    """Builds the response to one request.

    Args:
        asked: The request.
        served: The engine.
        texts: Texts of tokens.
    """

    def __init__(self, asked: GenerateRequest, served: ServedEngine, texts: TokenTexts) -> None:
        self._asked = asked
        self._texts = texts
        self._eos = served.engine.model_info.eos_token_ids
        self._id = f"generate-tokens-{asked.request_id}"
        self._model = asked.model or served.name
        self._created = int(time.time())
        self._ended: list[Completion] = []
        self._usages = RunningUsages(asked.continuous_usage)

    def whole(self, completions: Sequence[Completion]) -> types.GenerateAnswer:
        """Return the whole response."""
        first = completions[0]
        return {
            **self._frame([self._choice(completion) for completion in completions]),
            "usage": usage_of(completions),
            "prompt_logprobs": prompt_logprobs(first, self._texts),
            "prompt_token_ids": first.prompt_token_ids if self._asked.return_token_ids else None,
            "mm_placeholders": None,
            "kv_transfer_params": None,
            "metrics": None,
            "prompt_token_id_logprobs": None,
        }

    def _choice(self, completion: Completion) -> types.GenerateChoice:
        return {
            "index": completion.sample_index,
            "token_ids": completion.token_ids,
            "logprobs": token_logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs),
            "finish_reason": FINISH_REASON[completion.finish_reason],
            "stop_reason": stop_reason(completion, self._eos),
            "routed_experts": None if completion.routed_experts is None else completion.routed_experts.tolist(),
            "sampling_mask": None,
            "weight_versions": _weight_versions(completion),
        }

    def chunks(self, chunk: CompletionChunk) -> Iterator[types.GenerateChunk]:
        """Yield the chunks of a stream."""
        choice: types.GenerateChoice = {
            "index": chunk.sample_index,
            "token_ids": chunk.token_ids,
            "logprobs": token_logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs),
            "finish_reason": None,
            "stop_reason": None,
            "routed_experts": None,
            "sampling_mask": None,
        }
        if (completion := chunk.completion) is not None:
            self._ended.append(completion)
            choice["finish_reason"] = FINISH_REASON[completion.finish_reason]
            choice["stop_reason"] = stop_reason(completion, self._eos)
            choice["weight_versions"] = _weight_versions(completion)
        usage = self._usages.after(choice["index"], choice["token_ids"], self._asked.token_ids)
        yield {**self._frame([choice]), "usage": usage}

    def usage_chunk(self) -> types.GenerateChunk:
        """Return the final chunk, which has the usage and no choices."""
        return {**self._frame([]), "usage": usage_of(self._ended)}

    def _frame(self, choices: list[types.GenerateChoice]) -> types.GenerateFrame:
        return {
            "request_id": self._id,
            "model": self._model,
            "created": self._created,
            "output_mode": "tokens",
            "choices": choices,
        }


def token_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[float] | None, top: Sequence[TopLogprobs] | None
) -> types.TokenIdLogprobs | None:
    """Return logprobs of ``/inference/v1/generate``: token ids as numbers, and as the strings of earlier releases."""
    if logprobs is None:
        return None
    ids = list(token_ids)
    return {
        "content": [
            {**_token(token_id, value, _rank(token_id, others)), "top_logprobs": _tops(others)}
            for token_id, value, others in zip(ids, logprobs, top or [[]] * len(ids), strict=True)
        ]
    }


def _tops(others: TopLogprobs) -> list[types.TokenIdLogprob]:
    return [_token(token_id, value, rank) for rank, (token_id, value) in enumerate(others, 1)]


def _token(token_id: int, logprob: float, rank: int | None) -> types.TokenIdLogprob:
    return {
        "token": f"token_id:{token_id}",
        "token_id": token_id,
        "logprob": json_logprob(logprob),
        "rank": rank,
        "bytes": None,
    }


def _rank(token_id: int, others: TopLogprobs) -> int | None:
    return next((rank for rank, (other, _) in enumerate(others, 1) if other == token_id), None)


def _weight_versions(completion: Completion) -> list[WeightSpan]:
    """Return the weight version of each token, as spans."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_versions]
