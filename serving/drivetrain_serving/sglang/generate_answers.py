"""Answers to ``/generate``: text, token ids, and all else in ``meta_info``."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from time import monotonic

from drivetrain.engine.engine import InferenceEngine
from drivetrain.openai.choices import json_logprob
from drivetrain.openai.responses import WeightSpan
from drivetrain.types.outputs import Completion, CompletionChunk, FinishReason
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_serving.routed_experts import PackedExperts
from drivetrain_serving.sglang.answer_types import FinishReason as Ended
from drivetrain_serving.sglang.answer_types import Generated, MetaInfo, TokenEntry
from drivetrain_serving.sglang.generate_request import Asked, Generation


@dataclass(slots=True)
class _Growing:
    """Ids, text and logprobs of one sample that have been streamed."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenEntry] = field(default_factory=list)
    top_logprobs: list[list[TokenEntry]] = field(default_factory=list)


class GenerateAnswers:
    """Builds the answer to one request, whole or as a stream.

    Args:
        asked: The request.
        engine: The engine.
        prompt_lengths: Number of tokens of each prompt.
        experts: Packs the experts of completions.
    """

    def __init__(
        self, asked: Generation, engine: InferenceEngine, prompt_lengths: Sequence[int], experts: PackedExperts
    ) -> None:
        self._asked = asked
        self._engine = engine
        self._lengths = prompt_lengths
        self._experts = experts
        self._begun = monotonic()
        self._growing: dict[str, _Growing] = {}
        self._texts: dict[int, str] = {}
        self._with_text = asked.body.return_text_in_logprobs is True

    def whole(self, completions: Sequence[Completion]) -> Generated | list[Generated]:
        """Return the whole answer: an object for one completion of one prompt, else a list."""
        answers = [self._finished(completion) for completion in completions]
        return answers[0] if self._asked.single else answers

    def event(self, chunk: CompletionChunk) -> Generated:
        """Return an event of a stream: text, ids and logprobs of the sample from its beginning."""
        known = self._growing.setdefault(chunk.request_id, _Growing())
        known.token_ids += chunk.token_ids
        known.text += chunk.text
        known.logprobs += [self._entry(*one) for one in zip(chunk.token_ids, chunk.logprobs or (), strict=False)]
        known.top_logprobs += [self._entries(others) for others in chunk.top_logprobs or ()]
        if chunk.completion is not None:
            answer = self._finished(chunk.completion)
        else:
            answer = self._unfinished(chunk, known)
        if not self._asked.single:
            samples = self._asked.asked[0].sampling.n or 1
            answer["index"] = chunk.prompt_index * samples + chunk.sample_index
        return answer

    def _unfinished(self, chunk: CompletionChunk, known: _Growing) -> Generated:
        asked = self._asked.asked[chunk.prompt_index]
        meta: MetaInfo = {
            "id": chunk.request_id,
            "finish_reason": None,
            "prompt_tokens": self._lengths[chunk.prompt_index],
            "weight_version": self._engine.get_weight_version(),
            "completion_tokens": len(known.token_ids),
        }
        if asked.logprobs:
            _add_output(meta, asked, list(known.logprobs), list(known.top_logprobs))
        return {"text": known.text, "output_ids": list(known.token_ids), "meta_info": meta}

    def _finished(self, completion: Completion) -> Generated:
        asked = self._asked.asked[completion.prompt_index]
        spans: list[WeightSpan] = [
            {"version": one.version, "start": one.start, "end": one.end} for one in completion.weight_versions
        ]
        meta: MetaInfo = {
            "id": completion.request_id,
            "finish_reason": finish_reason(completion),
            "prompt_tokens": len(completion.prompt_token_ids),
            "weight_version": spans[-1]["version"] if spans else self._engine.get_weight_version(),
            "weight_versions": spans,
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": completion.cached_tokens,
            "e2e_latency": monotonic() - self._begun,
        }
        if asked.logprobs:
            self._add_input(meta, asked, completion)
            given = zip(completion.token_ids, completion.logprobs or (), strict=False)
            tops = [self._entries(others) for others in completion.top_logprobs or ()]
            _add_output(meta, asked, [self._entry(*one) for one in given], tops)
        if asked.sampling.top_p_token_ids and completion.sampling_mask:
            _add_top_p_token_ids(meta, completion.sampling_mask)
        if self._asked.body.return_routed_experts:
            start = self._asked.body.routed_experts_start_len or 0
            if (experts := self._experts.of(completion, start)) is not None:
                meta["routed_experts"] = experts
        text = text_of(completion, asked, self._engine)
        answer: Generated = {"text": text, "output_ids": completion.token_ids, "meta_info": meta}
        if self._asked.body.return_prompt_token_ids:
            answer["prompt_token_ids"] = completion.prompt_token_ids
        return answer

    # Logprobs ----------------------------------------------------------------------------------------------------

    def _add_input(self, meta: MetaInfo, asked: Asked, completion: Completion) -> None:
        """Add the logprobs of the prompt from ``logprob_start_len`` on; the first has none, as in SGLang."""
        start = asked.logprob_start
        meta["input_token_logprobs"] = []
        if asked.top_logprobs:
            meta["input_top_logprobs"] = []
        if start < 0 or completion.prompt_logprobs is None:
            return
        given = [None, *completion.prompt_logprobs[start + 1 :]]
        ids = completion.prompt_token_ids[start:]
        meta["input_token_logprobs"] = [self._entry(*one) for one in zip(ids, given, strict=False)]
        if asked.top_logprobs:
            tops = (completion.prompt_top_logprobs or [])[start + 1 :]
            meta["input_top_logprobs"] = [None, *(self._entries(others or []) for others in tops)]

    def _entries(self, others: Iterable[tuple[int, float]]) -> list[TokenEntry]:
        return [self._entry(token_id, value) for token_id, value in others]

    def _entry(self, token_id: int, logprob: float | None) -> TokenEntry:
        text = None
        if self._with_text and (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self._engine.decode([token_id], skip_special_tokens=False)
        return (None if logprob is None else json_logprob(logprob), token_id, text)


def _add_output(meta: MetaInfo, asked: Asked, entries: list[TokenEntry], tops: list[list[TokenEntry]]) -> None:
    meta["output_token_logprobs"] = entries
    meta["output_token_logprobs_length"] = len(entries)
    if asked.top_logprobs:
        meta["output_top_logprobs"] = tops


def _add_top_p_token_ids(meta: MetaInfo, mask: SamplingMask) -> None:
    """Add the ids left to draw each token from, as slime reads them: base64 of int32, little-endian.

    Those of token i are ``top_p_token_ids[top_p_token_offsets[i]:top_p_token_offsets[i + 1]]``.
    """
    rows = [mask.ids(position) for position in range(len(mask))]
    meta["top_p_token_ids"] = _base64(chain.from_iterable(rows))
    meta["top_p_token_offsets"] = _base64(accumulate(map(len, rows), initial=0))


def _base64(numbers: Iterable[int]) -> str:
    words = array("i", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return b64encode(words).decode()


def finish_reason(completion: Completion) -> Ended:
    """Return the object that says why a completion ended."""
    match completion.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": completion.matched_stop}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(completion.token_ids)}
        case FinishReason.ABORT:
            message = "Aborted" if completion.token_ids else "Abort in waiting queue"
            return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def text_of(completion: Completion, asked: Asked, engine: InferenceEngine) -> str:
    """Return the text as SGLang trims it: without a stop string or token, or with it under ``no_stop_trim``.

    The match of a stop regex stays. The ids hold the match in every case.
    """
    matched, text = completion.matched_stop, completion.text
    if isinstance(matched, int):
        if asked.sampling.no_stop_trim:
            skip = asked.sampling.skip_special_tokens is not False
            return engine.decode(completion.token_ids, skip_special_tokens=skip)
        return text
    if matched in asked.sampling.stop_strings and not asked.sampling.no_stop_trim:
        return text[: text.find(matched)] if matched in text else text
    return text
