"""Turns a backend's result into a checked completion."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.backend.toolkit.translation import non_finite_logits
from drivetrain.engine.samples import Sample
from drivetrain.errors import EngineInternalError, WeightVersionGone
from drivetrain.text.stops import StopMatcher
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.outputs import Completion, FinishReason, MatchedText, VersionSpan, make_text_later
from drivetrain.types.sampling import SamplingParams
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain.types.token_scores import TokenScores


def aborted_before_start(sample: Sample) -> GenerateResult:
    """Return the result of a request that was aborted while it waited."""
    request = sample.request
    wants = request.params.logprobs is not None
    return GenerateResult(
        token_ids=[],
        finish_reason=FinishReason.ABORT,
        weight_versions=[],
        logprobs=[] if wants else None,
        top_logprobs=[] if request.params.logprobs else None,
    )


def is_unlabelled_score(sample: Sample, result: GenerateResult) -> bool:
    """Return whether the result belongs to a prompt that was only scored, and names no weight version."""
    scored = sample.request.max_new_tokens == 0 and result.finish_reason is not FinishReason.ABORT
    return scored and not result.weight_versions


def labelled_score(result: GenerateResult, version: str) -> GenerateResult:
    """Record the weight version in the result of a prompt that was only scored: no token carries the version."""
    return replace(result, weight_versions=[VersionSpan(version, 0, 0)])


def to_completion(sample: Sample, result: GenerateResult, tokenizer: Tokenizer) -> Completion:
    """Check a result, cut it at its first stop match, and return it as a completion.

    Ids that were not checked for stops yet are checked here. If no stop condition needs the text, it is decoded when
    it is first read.

    Raises:
        EngineInternalError: the engine returned ids outside the vocabulary, or text, logprobs or versions that do not
            align with its ids.
        NonFiniteLogits: the engine returned NaN logprobs.
        WeightVersionGone: some tokens come from another version than the request's ``weight_version``.
    """
    request, params = sample.request, sample.request.params
    if result.scores is None and request.scoring is not None and len(request.prompt_token_ids) == 1:
        result = replace(result, scores=TokenScores.of_one_token(request.scoring))
    check_sampled_ids(sample, result.token_ids)
    _check_aligned(request, result)
    _check_numbers(request, result)
    check_pinned(request, result)
    ids = result.token_ids
    matched: int | str | None = result.matched_stop
    text = ""
    later: list[int] = []
    found = result.matched_text
    if found is None and StopMatcher.needed(params):
        found = _match(result, params, tokenizer)
    if found is not None:
        text = found.text
        if found.matched is not None:
            result = _cut(result, found.token_count)
            ids, matched = result.token_ids, found.matched
    else:
        later = ids[:-1] if result.matched_stop is not None else ids[:]  # a copy: the caller may change its list
    wants_logprobs = params.logprobs is not None
    completion = Completion(
        request_id=request.request_id,
        prompt_index=sample.prompt_index,
        sample_index=sample.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=ids,
        text=text,
        finish_reason=FinishReason.STOP if matched is not None else result.finish_reason,
        matched_stop=matched,
        logprobs=result.logprobs,
        logprobs_mode=request.logprobs_mode if wants_logprobs else None,
        top_logprobs=result.top_logprobs,
        prompt_logprobs=result.prompt_logprobs,
        prompt_top_logprobs=result.prompt_top_logprobs,
        prompt_ranks=result.prompt_ranks,
        weight_versions=tuple(result.weight_versions),
        cached_tokens=result.cached_tokens,
        hidden_states=result.hidden_states,
        routed_experts=result.routed_experts,
        prompt_routed_experts=result.prompt_routed_experts,
        sampling_mask=_mask_of(sample, result),
        scores=result.scores if request.scoring is not None else None,
    )
    if not later:
        return completion
    return make_text_later(
        completion, functools.partial(tokenizer, later, skip_special_tokens=params.skip_special_tokens)
    )


def _mask_of(sample: Sample, result: GenerateResult) -> SamplingMask | None:
    if not sample.request.params.return_sampling_mask:
        return None
    return result.sampling_mask or SamplingMask(sample.samples.vocab_size)


def check_pinned(request: GenerateRequest, result: GenerateResult) -> None:
    """Raise :class:`WeightVersionGone` if a token is of another version than the request's ``weight_version``."""
    pinned = request.weight_version
    if pinned is None or all(span.version == pinned for span in result.weight_versions):
        return
    others = ", ".join(repr(span.version) for span in result.weight_versions if span.version != pinned)
    raise WeightVersionGone(
        f"request {request.request_id}: an update replaced weight_version={pinned!r} before its end; later tokens are "
        f"of {others}. Send it again for a version that is served"
    )


async def completed(sample: Sample, result: GenerateResult, tokenizer: Tokenizer) -> Completion:
    """Call :func:`to_completion`, in a thread if a stop regex must still be matched over more than a few tokens."""
    if result.matched_text is None and sample.request.params.stop_regex and len(result.token_ids) > 16:
        return await asyncio.to_thread(to_completion, sample, result, tokenizer)
    return to_completion(sample, result, tokenizer)


def _match(result: GenerateResult, params: SamplingParams, tokenizer: Tokenizer) -> MatchedText:
    matcher = StopMatcher(params, tokenizer)
    for token_id in result.token_ids if result.matched_stop is None else result.token_ids[:-1]:
        if matcher.push(token_id) is not None:
            break
    return matcher.outcome()


def _cut(result: GenerateResult, count: int) -> GenerateResult:
    spans = [
        VersionSpan(span.version, span.start, min(span.end, count))
        for span in result.weight_versions
        if span.start < count
    ]
    return replace(
        result,
        token_ids=result.token_ids[:count],
        weight_versions=spans,
        logprobs=result.logprobs[:count] if result.logprobs is not None else None,
        top_logprobs=result.top_logprobs[:count] if result.top_logprobs is not None else None,
        hidden_states=result.hidden_states[:count] if result.hidden_states is not None else None,
        routed_experts=result.routed_experts[:count] if result.routed_experts is not None else None,
        sampling_mask=result.sampling_mask[:count] if result.sampling_mask is not None else None,
    )


def check_sampled_ids(sample: Sample, token_ids: Sequence[int]) -> None:
    """Raise :class:`EngineInternalError` for ids outside the vocabulary, which cannot be decoded."""
    if token_ids and not (0 <= min(token_ids) and max(token_ids) < sample.samples.vocab_size):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < sample.samples.vocab_size)
        raise EngineInternalError(
            f"request {sample.request.request_id}: the engine returned the token id {bad}, which is outside the "
            f"vocabulary of {sample.samples.vocab_size} ids; this is a fault of the engine or its backend"
        )


def _check_numbers(request: GenerateRequest, result: GenerateResult) -> None:
    # The sum is NaN exactly if a logprob is: none is above 0, so no two infinities cancel out.
    if result.logprobs and math.isnan(sum(result.logprobs)):
        raise non_finite_logits(request, next(at for at, value in enumerate(result.logprobs) if math.isnan(value)))
    if result.prompt_logprobs and math.isnan(sum(value for value in result.prompt_logprobs if value is not None)):
        raise non_finite_logits(request)
    if result.scores is not None and result.scores.has_nan(len(request.prompt_token_ids)):
        raise non_finite_logits(request)


def _check_aligned(request: GenerateRequest, result: GenerateResult) -> None:
    count = len(result.token_ids)
    wants = request.params.logprobs
    if wants is not None and (result.logprobs is None or len(result.logprobs) != count):
        got = "none" if result.logprobs is None else str(len(result.logprobs))
        raise EngineInternalError(f"request {request.request_id}: the engine returned {count} ids and {got} logprobs")
    if wants and (result.top_logprobs is None or len(result.top_logprobs) != count):
        got = "none" if result.top_logprobs is None else str(len(result.top_logprobs))
        raise EngineInternalError(
            f"request {request.request_id}: the engine returned {count} ids and {got} top logprobs"
        )
    if request.params.return_sampling_mask:
        _check_mask(request, result)
    if request.scoring is not None and result.finish_reason is not FinishReason.ABORT:
        fault = "there are no scores"
        if result.scores is not None:
            fault = result.scores.fault(request.scoring, len(request.prompt_token_ids))
        if fault:
            raise EngineInternalError(f"request {request.request_id}: the engine returned other scores: {fault}")
    found = result.matched_text
    if found is not None and not 0 <= found.token_count <= count:
        raise EngineInternalError(
            f"request {request.request_id}: the engine returned {count} ids and a text of {found.token_count} of them"
        )
    if count == 0 and [(span.start, span.end) for span in result.weight_versions] == [(0, 0)]:
        return
    at = 0
    for span in result.weight_versions:
        if span.start != at or span.end <= span.start:
            raise EngineInternalError(f"request {request.request_id}: version spans have a gap at token {at}: {span}")
        at = span.end
    if at != count and result.weight_versions:
        raise EngineInternalError(f"request {request.request_id}: version spans cover {at} of {count} tokens")


def _check_mask(request: GenerateRequest, result: GenerateResult) -> None:
    mask, count = result.sampling_mask, len(result.token_ids)
    try:
        positions = 0 if mask is None else len(mask)
    except ValueError as error:
        raise EngineInternalError(
            f"request {request.request_id}: the engine returned a sampling mask that cannot be read: {error}"
        ) from error
    if positions != count:
        raise EngineInternalError(
            f"request {request.request_id}: the engine returned {count} ids and a sampling mask of {positions}"
        )
