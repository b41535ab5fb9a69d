"""Continues a sample at another engine, from the tokens that it has."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.types.outputs import FinishReason, TopLogprobs, VersionSpan
from drivetrain.types.sampling import SamplingParams, TemperatureSchedule
from drivetrain.types.sampling_mask import SamplingMask


def not_resumable(request: GenerateRequest, *, counted: bool) -> tuple[str, ...]:
    """Return the fields of a request that keep another engine from continuing it as if it was never interrupted.

    The next engine takes the tokens for a part of the prompt. Its grammar would forget them, and values that an engine
    returns with a whole result would be lost. Stops on text are found by the fleet, which sees all tokens.

    Args:
        request: The request.
        counted: True if the next engine honours ``GenerateRequest.resumed_tokens``. If false, penalties and schedules
            would forget the tokens, and a seed's random numbers would begin anew.
    """
    params = request.params
    set_fields = {
        "frequency_penalty": params.frequency_penalty != 0 and not counted,
        "presence_penalty": params.presence_penalty != 0 and not counted,
        "seed": request.seed is not None and params.temperature > 0 and not counted,
        "logit_processors": _has_schedule(params) and not counted,
        "structured_output": params.structured_output is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "return_hidden_states": params.return_hidden_states,
        "return_routed_experts": params.return_routed_experts,
        "return_prompt_routed_experts": params.return_prompt_routed_experts,
        "media": bool(request.media),
        "scoring": request.scoring is not None,
    }
    return tuple(field for field, is_set in set_fields.items() if is_set)


def _has_schedule(params: SamplingParams) -> bool:
    return any(isinstance(processor, TemperatureSchedule) for processor in params.logit_processors)


class SoFar:
    """Tokens of one sample from the engines that were lost with it, and what remains to be generated.

    Args:
        request: The request, as the fleet got it.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.whole = request
        self.request = _without_text_stops(request)
        """The request for the next engine. The fleet looks for stops on text, which may span the tokens of two."""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._masks: list[SamplingMask] = []
        self._spans: list[VersionSpan] = []

    def add(self, delta: TokenDelta) -> None:
        """Keep the tokens of a step that was handed out."""
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs or []
        self._top_logprobs += delta.top_logprobs or []
        if delta.sampling_mask is not None:
            self._masks.append(delta.sampling_mask)

    def __len__(self) -> int:
        return len(self._ids)

    def resume(self, version: str, *, counted: bool) -> str:
        """Ask for the rest; return why that is impossible, or "".

        Args:
            version: The weight version of the tokens that were added last.
            counted: True if the next engine honours ``GenerateRequest.resumed_tokens``.
        """
        params, made = self.whole.params, len(self._ids)
        if params.logprobs is not None and len(self._logprobs) != made:
            return "its engine did not stream all logprobs"
        if params.logprobs and len(self._top_logprobs) != made:
            return "its engine did not stream all top logprobs"
        if params.return_sampling_mask and sum(map(len, self._masks)) != made:
            return "its engine did not stream the whole sampling mask"
        _extend(self._spans, version, made)
        drawn = self.whole.resumed_tokens + made
        least = params.min_new_tokens if counted else max(params.min_new_tokens - drawn, 0)
        self.request = replace(
            self.request,
            prompt_token_ids=[*self.whole.prompt_token_ids, *self._ids],
            params=self.request.params.model_copy(update={"min_new_tokens": least}),
            max_new_tokens=self.whole.max_new_tokens - made,
            resumed_tokens=drawn if counted else 0,
        )
        return ""

    def ended(self) -> GenerateResult | None:
        """Return the result if no token is left to generate: the engine was lost before it reported the end."""
        made = len(self._ids)
        drawn = self.whole.resumed_tokens + made
        stopped = drawn > self.whole.params.min_new_tokens and self._ids[-1] in self.whole.stop_token_ids
        if not self._spans or not (stopped or made == self.whole.max_new_tokens):
            return None
        wanted = self.whole.params.logprobs
        return GenerateResult(
            token_ids=self._ids[:],
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            weight_versions=self._spans[:],
            matched_stop=self._ids[-1] if stopped else None,
            logprobs=self._logprobs[:] if wanted is not None else None,
            top_logprobs=self._top_logprobs[:] if wanted else None,
            sampling_mask=self._mask(made),
        )

    def joined_delta(self, delta: TokenDelta) -> TokenDelta:
        """Put the earlier tokens before a last result, and leave the text to whoever sees all tokens."""
        result = None if delta.result is None else replace(self.joined(delta.result), matched_text=None)
        return replace(delta, result=result, released=None)

    def joined(self, result: GenerateResult) -> GenerateResult:
        """Put the tokens of earlier engines before the result of the last one."""
        if not self._spans:
            return result
        made = self._spans[-1].end
        spans = self._spans[:]
        for span in result.weight_versions:
            _extend(spans, span.version, made + span.end)
        return replace(
            result,
            token_ids=self._ids[:made] + result.token_ids,
            weight_versions=spans,
            logprobs=None if result.logprobs is None else self._logprobs[:made] + result.logprobs,
            top_logprobs=None if result.top_logprobs is None else self._top_logprobs[:made] + result.top_logprobs,
            cached_tokens=min(result.cached_tokens, len(self.whole.prompt_token_ids)),
            matched_text=None,
            sampling_mask=_joined(self._mask(made), result.sampling_mask),
        )

    def _mask(self, made: int) -> SamplingMask | None:
        """Return the mask of the first tokens; None if the request asks for none."""
        return SamplingMask.join(self._masks[0].vocab_size, self._masks)[:made] if self._masks else None


def _joined(first: SamplingMask | None, rest: SamplingMask | None) -> SamplingMask | None:
    return first + rest if first is not None and rest is not None else first or rest


def _extend(spans: list[VersionSpan], version: str, end: int) -> None:
    """Let the spans reach to ``end``; their last tokens are of this version."""
    start = spans[-1].end if spans else 0
    if start == end:
        return
    if spans and spans[-1].version == version:
        start = spans.pop().start
    spans.append(VersionSpan(version, start, end))


def _without_text_stops(request: GenerateRequest) -> GenerateRequest:
    params = request.params
    if not (params.stop or params.stop_regex):
        return request
    without = {"stop": (), "stop_regex": (), "include_stop_str_in_output": False}
    return replace(request, params=params.model_copy(update=without))
