"""From what a trainer asks to what a backend is given, and from what a backend returns to a completion."""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drivetrain.backend import GenerateRequest, GenerateResult, ModelInfo, ReadMedium
from drivetrain.capability import Capability
from drivetrain.config import EngineConfig
from drivetrain.errors import EngineInternalError, InvalidRequest
from drivetrain.media import placed
from drivetrain.outputs import Completion, FinishReason, VersionSpan, make_text_later
from drivetrain.prompts import Prompt, PromptLike
from drivetrain.sampling import SamplingParams
from drivetrain.stops import StopMatcher
from drivetrain.tokenizer import Tokenizer
from drivetrain.validation import (
    as_prompts,
    check_media,
    check_params_fit,
    check_params_supported,
    check_prompt_ids,
    check_sampling_params,
    require,
    resolve_max_new_tokens,
)

ParamsLike = SamplingParams | Mapping[str, object]


@dataclass(slots=True, eq=False)
class Flight:
    """One sample on its way: its request, where it belongs, and whether someone asked to end it."""

    request: GenerateRequest
    prompt_index: int
    sample_index: int
    aborted: bool = False


class RequestBuilder:
    """Builds the flights of a call. Everything that can be refused is refused here, before any work."""

    def __init__(
        self, config: EngineConfig, capabilities: frozenset[Capability], model: ModelInfo, tokenizer: Tokenizer
    ) -> None:
        self._config = config
        self._capabilities = capabilities
        self._model = model
        self._tokenizer = tokenizer
        self._seeds = itertools.count()

    def build(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None,
        *,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
    ) -> list[Flight]:
        """Validate a call and return one flight per sample, prompt by prompt.

        Raises:
            InvalidRequest: a prompt or field is wrong.
            UnsupportedCapability: a field needs what this engine does not claim.
        """
        checked = as_prompts(prompts)
        params = self._params(sampling_params, len(checked))
        ids = self._ids(request_ids, len(checked))
        if lora is not None:
            require(self._capabilities, Capability.LORA, f"lora={lora!r}", self._config.backend)
        if type(priority) is not int:
            raise InvalidRequest(f"priority={priority!r}: expected an integer; higher is sooner", field="priority")
        if priority:
            require(self._capabilities, Capability.PRIORITY, f"priority={priority}", self._config.backend)
        flights: list[Flight] = []
        for index, (prompt, one, request_id) in enumerate(zip(checked, params, ids, strict=True)):
            flights.extend(self._flights(index, prompt, one, request_id, lora, priority))
        return flights

    def prompt_token_ids(self, prompts: PromptLike | Sequence[PromptLike]) -> list[list[int]]:
        """Validate prompts from which nothing is generated, and return the ids of each.

        Raises:
            InvalidRequest: a prompt is wrong, or holds media.
            UnsupportedCapability: a prompt holds media that this engine does not take at all.
        """
        checked = as_prompts(prompts)
        token_ids = [self._encode(index, prompt) for index, prompt in enumerate(checked)]
        if any(prompt.media for prompt in checked):
            raise InvalidRequest("only generate() takes images, video and audio beside a prompt", field="prompts")
        return token_ids

    def place(self, flights: Sequence[Flight], media: Sequence[ReadMedium]) -> None:
        """Put what was read into the prompt of these flights, which they share.

        Raises:
            InvalidRequest: it has no places for them, or does not fit the context with them.
        """
        where = f"prompts[{flights[0].prompt_index}]"
        first = flights[0].request
        token_ids = placed(first.prompt_token_ids, media, where)
        check_prompt_ids(token_ids, where, self._model)
        max_new_tokens = resolve_max_new_tokens(first.params, len(token_ids), where, self._model)
        held = tuple(
            given if read.data is None else type(given)(data=read.data)
            for given, read in zip(first.media, media, strict=True)
        )
        for flight in flights:
            flight.request = replace(
                flight.request, prompt_token_ids=token_ids, max_new_tokens=max_new_tokens, media=held
            )

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        where = f"prompts[{index}]"
        if prompt.media:
            check_media(prompt, where, self._config, self._capabilities)
        token_ids = self._tokenizer.encode(prompt)
        check_prompt_ids(token_ids, where, self._model)
        return token_ids

    def _flights(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        lora: str | None,
        priority: int,
    ) -> list[Flight]:
        token_ids = self._encode(index, prompt)
        max_new_tokens = resolve_max_new_tokens(params, len(token_ids), f"prompts[{index}]", self._model)
        stop_ids = params.stop_token_ids
        if not params.ignore_eos:
            stop_ids += tuple(eos for eos in self._model.eos_token_ids if eos not in stop_ids)
        mode = params.logprobs_mode or self._config.logprobs_mode
        return [
            Flight(
                GenerateRequest(
                    request_id=request_id if params.n == 1 else f"{request_id}/{sample}",
                    prompt_token_ids=token_ids,
                    params=params,
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=stop_ids,
                    logprobs_mode=mode,
                    seed=self._seed(params, sample),
                    lora=lora,
                    priority=priority,
                    media=prompt.media,
                ),
                prompt_index=index,
                sample_index=sample,
            )
            for sample in range(params.n)
        ]

    def _seed(self, params: SamplingParams, sample: int) -> int | None:
        if params.seed is not None:
            return (params.seed + sample) % 2**63
        if self._config.seed is not None and Capability.SEED in self._capabilities:
            # Far apart, so that samples of neighbouring calls share no seed with a request that brings its own.
            return (self._config.seed + (next(self._seeds) + 1) * 0x9E3779B97F4A7C15) % 2**63
        return None

    def _params(self, value: ParamsLike | Sequence[ParamsLike] | None, prompts: int) -> list[SamplingParams]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != prompts:
                raise InvalidRequest(
                    f"sampling_params has {len(value)} entries for {prompts} prompts; give one for all or one for each",
                    field="sampling_params",
                )
            checked = [check_sampling_params(item) for item in value]
        else:
            checked = [check_sampling_params(value)] * prompts
        for params in {id(item): item for item in checked}.values():
            check_params_supported(params, self._config, self._capabilities)
            check_params_fit(params, self._model, self._tokenizer.special_tokens)
        return checked

    @staticmethod
    def _ids(request_ids: Sequence[str] | None, prompts: int) -> list[str]:
        if request_ids is None:
            call = uuid.uuid4().hex[:16]
            return [f"{call}-{index}" for index in range(prompts)]
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        if not isinstance(request_ids, Sequence):
            raise InvalidRequest(
                f"request_ids is a {type(request_ids).__name__}; expected a list of strings", field="request_ids"
            )
        if len(request_ids) != prompts:
            raise InvalidRequest(
                f"request_ids has {len(request_ids)} entries for {prompts} prompts; give one for each",
                field="request_ids",
            )
        for request_id in request_ids:
            if not isinstance(request_id, str) or not request_id or any("\ud800" <= c <= "\udfff" for c in request_id):
                raise InvalidRequest(
                    f"request id {request_id!r}: expected a string of Unicode that is not empty", field="request_ids"
                )
        if len(set(request_ids)) != len(request_ids):
            twice = next(item for item in request_ids if list(request_ids).count(item) > 1)
            raise InvalidRequest(f"request id {twice!r} is given twice; ids must differ", field="request_ids")
        return list(request_ids)


def aborted_before_start(flight: Flight) -> GenerateResult:
    """The result of a request that was aborted while it waited."""
    request = flight.request
    wants = request.params.logprobs is not None
    return GenerateResult(
        token_ids=[],
        finish_reason=FinishReason.ABORT,
        weight_versions=[],
        logprobs=[] if wants else None,
        top_logprobs=[] if request.params.logprobs else None,
    )


def to_completion(flight: Flight, result: GenerateResult, tokenizer: Tokenizer) -> Completion:
    """Cut a result at its first stop match and check that nothing is out of line; it is decoded when that is asked for.

    Raises:
        EngineInternalError: the engine returned logprobs or versions that do not line up with its ids.
    """
    request, params = flight.request, flight.request.params
    _check_aligned(request, result)
    ids = result.token_ids
    matched: int | str | None = result.matched_stop
    text = ""
    later: list[int] = []
    if StopMatcher.needed(params):
        match = None
        matcher = StopMatcher(params, tokenizer)
        shown = ids[:-1] if result.matched_stop is not None else ids
        for token_id in shown:
            if (match := matcher.push(token_id)) is not None:
                break
        match = match or matcher.finish()
        if match is not None:
            result = _cut(result, match.token_count)
            ids, matched, text = result.token_ids, match.matched, match.text
        else:
            text = matcher.text
    else:
        later = ids[:-1] if result.matched_stop is not None else ids[:]  # the caller may change its list
    wants_logprobs = params.logprobs is not None
    completion = Completion(
        request_id=request.request_id,
        prompt_index=flight.prompt_index,
        sample_index=flight.sample_index,
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
        weight_versions=tuple(result.weight_versions),
        cached_tokens=result.cached_tokens,
        hidden_states=result.hidden_states,
        routed_experts=result.routed_experts,
    )
    if not later:
        return completion
    return make_text_later(
        completion, functools.partial(tokenizer, later, skip_special_tokens=params.skip_special_tokens)
    )


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
    )


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
    at = 0
    for span in result.weight_versions:
        if span.start != at or span.end <= span.start:
            raise EngineInternalError(f"request {request.request_id}: version spans have a gap at token {at}: {span}")
        at = span.end
    if at != count and result.weight_versions:
        raise EngineInternalError(f"request {request.request_id}: version spans cover {at} of {count} tokens")
