"""Fields that work alone, but are lost in combination with a pause, a stream or another field, or beyond a limit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, MatchedText, VersionSpan
from drivetrain.types.sampling import (
    ActionMask,
    DisallowedTokens,
    JsonSchema,
    LogitProcessor,
    LogprobsMode,
    TemperatureSchedule,
)
from drivetrain.types.weights import ApplyUpdate, WeightReply
from drivetrain_conformance.mutants.registry import backend_mutants, mixed, mutant, spoiled_backend
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    KnowingEos,
    KnowingRequests,
    after,
    asking,
    cut,
    joined,
    own,
    params_mutant,
    request_mutant,
    resubmitting,
    result_mutant,
    streamed_mutant,
)

# With a pause --------------------------------------------------------------------------------------------------------


retracted_mutant = backend_mutants(partial(resubmitting, PauseMode.RETRACT))
frozen_mutant = backend_mutants(partial(resubmitting, PauseMode.IN_PLACE))


@retracted_mutant("pause/retract_freezes_requests_in_flight", says="nats below")
def restarts_the_seed_of_the_retracted(request: GenerateRequest) -> GenerateRequest | None:
    """A retracted request restarts its random stream from the beginning."""
    return None if request.seed is None else request


@retracted_mutant("pause/retract_freezes_requests_in_flight", says="nats below")
def forgets_what_the_retracted_counted(request: GenerateRequest) -> GenerateRequest | None:
    """A frequency penalty counts only the tokens since the last retraction."""
    return request if request.params.frequency_penalty else None


@frozen_mutant("pause/in_place_freezes_requests_in_flight", says="nats below")
def forgets_what_the_frozen_had_present(request: GenerateRequest) -> GenerateRequest | None:
    """A presence penalty sees only the tokens since the last pause in place."""
    return request if request.params.presence_penalty else None


def _allowing(request: GenerateRequest, count: int) -> GenerateRequest | None:
    """Return a request whose action mask allows only its first ``count`` ids; None if none allows more."""
    processors = request.params.logit_processors
    if all(not isinstance(one, ActionMask) or len(one.allowed_token_ids) <= count for one in processors):
        return None
    fewer = (
        ActionMask(allowed_token_ids=one.allowed_token_ids[:count]) if isinstance(one, ActionMask) else one
        for one in processors
    )
    params = request.params.model_copy(update={"logit_processors": tuple(fewer)})
    return dataclasses.replace(request, params=params)


@frozen_mutant("pause/in_place_freezes_requests_in_flight", says="nats below")
def allows_fewer_ids_after_a_pause(request: GenerateRequest) -> GenerateRequest | None:
    """A request frozen in place goes on with the first 110 ids of its action mask."""
    return _allowing(request, 110)


@retracted_mutant("pause/retract_freezes_requests_in_flight", says="nats below")
def allows_fewer_ids_after_a_retraction(request: GenerateRequest) -> GenerateRequest | None:
    """A retracted request goes on with the first 110 ids of its action mask."""
    return _allowing(request, 110)


@frozen_mutant("pause/in_place_freezes_requests_in_flight", says="nats below")
def counts_min_new_tokens_from_a_pause(request: GenerateRequest) -> GenerateRequest | None:
    """A request frozen in place holds back stops for min_new_tokens further tokens."""
    return request if request.params.min_new_tokens else None


def _only_in_updates(
    frozen: PauseMode, backend: type[Backend], change: Callable[[GenerateRequest], GenerateRequest | None]
) -> type[Backend]:
    """Return a backend that resubmits requests as ``resubmitting`` does, but only those frozen by a weight update."""

    class Wrong(CorrectBackend):
        """Freezes by a pause as it should."""

        _updating = False

        async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
            self._updating = True
            try:
                return await super().apply_weights(update)
            finally:
                self._updating = False

        async def freeze(self, mode: PauseMode) -> None:
            await (super().freeze(mode) if self._updating else backend.freeze(self, mode))

    return mixed(resubmitting(frozen, backend, change), Wrong)


@backend_mutants(partial(_only_in_updates, PauseMode.RETRACT))(
    "weight_sync/retracted_requests_go_on_with_the_new_weights", says="nats below"
)
def restarts_the_seed_at_an_update(request: GenerateRequest) -> GenerateRequest | None:
    """A request that was retracted for an update restarts its random stream."""
    return None if request.seed is None else request


@backend_mutants(partial(_only_in_updates, PauseMode.RETRACT))(
    "lora/the_base_is_updated_beneath_an_adapter", says="nats below"
)
def updates_without_the_adapter(request: GenerateRequest) -> GenerateRequest | None:
    """A request that was retracted for an update of the base continues without its adapter."""
    return dataclasses.replace(request, lora=None) if request.lora else None


@backend_mutants(partial(_only_in_updates, PauseMode.IN_PLACE))(
    "weight_sync/frozen_requests_go_on_where_they_were", says="nats below"
)
def forgets_what_was_counted_before_an_update(request: GenerateRequest) -> GenerateRequest | None:
    """A frequency penalty counts only the tokens since the last update in place."""
    return request if request.params.frequency_penalty else None


@retracted_mutant("generate/higher_priority_starts_sooner", says="ran after others of lower priority")
def retracts_without_the_priority(request: GenerateRequest) -> GenerateRequest | None:
    """A retracted request loses its priority and waits behind requests that have one."""
    return dataclasses.replace(request, priority=0) if request.priority > 0 else None


@retracted_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def retracts_without_the_adapter(request: GenerateRequest) -> GenerateRequest | None:
    """A retracted request continues without its adapter."""
    return dataclasses.replace(request, lora=None) if request.lora else None


@frozen_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def freezes_without_the_adapter(request: GenerateRequest) -> GenerateRequest | None:
    """A request frozen in place continues without its adapter."""
    return dataclasses.replace(request, lora=None) if request.lora else None


@retracted_mutant("pause/retract_freezes_requests_in_flight", says=("the first are the same", "text"))
def matches_stop_texts_from_a_retraction_on(request: GenerateRequest) -> GenerateRequest | None:
    """A stop text that was half written when its request was retracted is not recognised."""
    return request if request.params.stop_regex else None


def _joined_texts(first: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Put two results together, with the text of both."""
    both, begun, found = joined(first, rest), first.matched_text, rest.matched_text
    if begun is None or found is None:
        return both
    count = begun.token_count + found.token_count
    return dataclasses.replace(both, matched_text=MatchedText(begun.text + found.text, count, found.matched))


@backend_mutants(partial(resubmitting, PauseMode.RETRACT, join=_joined_texts))(
    "pause/retract_freezes_requests_in_flight", says=("the first are the same", "nats below")
)
def matches_stop_strings_from_a_retraction_on(request: GenerateRequest) -> GenerateRequest | None:
    """A stop string that was half written when its request was retracted is not recognised."""
    return request if request.params.stop else None


@mutant("pause/retract_freezes_requests_in_flight", says="prompt tokens were cached")
class counts_what_a_retraction_recomputed(KnowingRequests):
    """A retracted request counts its own output among the cached tokens of its prompt."""

    _retracted: set[str] = own(set)

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(mode)
        if mode is PauseMode.RETRACT:
            self._retracted |= self.flying

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.request_id not in self._retracted:
            return result
        return dataclasses.replace(result, cached_tokens=len(request.prompt_token_ids) + len(result.token_ids) // 2)


@result_mutant("pause/abort_ends_requests_in_flight", says="0 top logprobs")
def loses_the_alternatives_of_the_aborted(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """An aborted request comes back without the likeliest tokens that were asked for."""
    aborted = result.finish_reason is FinishReason.ABORT and result.top_logprobs is not None
    return dataclasses.replace(result, top_logprobs=[]) if aborted else result


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="the logprob of prompt token")
class scores_prompts_by_the_first_weights(CorrectBackend):
    """Prompt logprobs are cached, and stay the same after the weights changed."""

    _known: dict[tuple[int, ...], list[float | None] | None] = own(dict)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if result.prompt_logprobs is None:
            return result
        first = self._known.setdefault(tuple(request.prompt_token_ids), result.prompt_logprobs)
        return dataclasses.replace(result, prompt_logprobs=first)


@params_mutant("logprob/processed_follows_everything_at_once", says="in mode processed at temperature")
def runs_a_schedule_past_its_end(request: GenerateRequest) -> Mapping[str, object]:
    """After its last step a temperature schedule goes on at the same rate, until the temperature is almost 0."""

    def prolonged(processor: LogitProcessor) -> LogitProcessor:
        if not isinstance(processor, TemperatureSchedule) or processor.steps < 2:
            return processor
        steps = 4 * processor.steps
        end = processor.start + (processor.end - processor.start) * (steps - 1) / (processor.steps - 1)
        return processor.model_copy(update={"end": max(end, 0.05), "steps": steps})

    return {"logit_processors": tuple(map(prolonged, request.params.logit_processors))}


@params_mutant("sampling/a_temperature_schedule_moves_from_start_to_end", says="the logprob of token 1 is")
def ends_a_schedule_one_token_late(request: GenerateRequest) -> Mapping[str, object]:
    """A temperature schedule takes one token more than its steps."""

    def longer(processor: LogitProcessor) -> LogitProcessor:
        if not isinstance(processor, TemperatureSchedule):
            return processor
        return processor.model_copy(update={"steps": processor.steps + 1})

    return {"logit_processors": tuple(map(longer, request.params.logit_processors))}


# With a request that ends beside it ----------------------------------------------------------------------------------

_SHORT = 12


def inheriting(
    sound: type[Backend], change: Callable[[GenerateRequest, GenerateRequest], GenerateRequest]
) -> type[Backend]:
    """Return a backend that changes the rest of a request once an earlier one has ended.

    ``change`` gets the request for the remaining tokens, and a request that ended.
    """

    class Wrong(CorrectBackend):
        """Changes requests in flight."""

        _flying: list[GenerateRequest] = own(list)
        _ended: dict[str, list[GenerateRequest]] = own(dict)

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            self._flying.append(request)
            ended = self._ended[request.request_id] = []
            try:
                count = min(_SHORT, request.max_new_tokens)
                first = await super().generate(dataclasses.replace(request, max_new_tokens=count))
                if first.finish_reason is not FinishReason.LENGTH or count == request.max_new_tokens:
                    return first
                rest = dataclasses.replace(after(request, first), resumed_tokens=request.resumed_tokens + count)
                for other in ended:
                    rest = change(rest, other)
                return joined(first, await super().generate(rest))
            finally:
                later = self._flying[self._flying.index(request) + 1 :]
                self._flying.remove(request)
                del self._ended[request.request_id]
                for other in later:
                    self._ended[other.request_id].append(request)

    return mixed(sound, Wrong)


inheriting_mutant = backend_mutants(inheriting)


@inheriting_mutant(
    "generate/each_prompt_can_have_params_of_its_own", says=("nats below", "cannot be drawn by", "asked again")
)
def inherits_what_another_may_not_draw(request: GenerateRequest, ended: GenerateRequest) -> GenerateRequest:
    """A request that takes the place of an ended one may not draw the tokens that were forbidden to the ended one."""
    processors = request.params.logit_processors or ended.params.logit_processors
    params = request.params.model_copy(update={"logit_processors": processors})
    return dataclasses.replace(request, params=params)


@inheriting_mutant("generate/each_prompt_can_have_params_of_its_own", says="asked again")
def inherits_the_seed_of_another(request: GenerateRequest, ended: GenerateRequest) -> GenerateRequest:
    """A request that takes the place of one that ended continues its random stream."""
    return request if request.seed is None or ended.seed is None else dataclasses.replace(request, seed=ended.seed)


# With another engine -------------------------------------------------------------------------------------------------


@request_mutant("sampling/a_seed_fixes_the_output", says="outputs differ")
def takes_what_it_resumes_for_the_prompt(request: GenerateRequest) -> GenerateRequest:
    """Tokens that a lost engine made do not count for the seed, penalties and schedules of a resumed request."""
    return dataclasses.replace(request, resumed_tokens=0)


# With a stream -------------------------------------------------------------------------------------------------------


@streamed_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def streams_without_the_adapter(request: GenerateRequest) -> GenerateRequest:
    """A stream ignores its adapter."""
    return dataclasses.replace(request, lora=None)


@streamed_mutant("streaming/a_stream_with_any_stops_agrees_with_the_reference", says="'min_new_tokens':")
def streams_without_min_new_tokens_where_text_stops(request: GenerateRequest) -> GenerateRequest:
    """A stream with a stop string may end before min_new_tokens."""
    fields = {"min_new_tokens": 0} if request.params.stop else {}
    return dataclasses.replace(request, params=request.params.model_copy(update=fields))


@streamed_mutant("generate/higher_priority_starts_sooner", says="assert streamed == sorted(streamed, reverse=True)")
def streams_without_the_priority(request: GenerateRequest) -> GenerateRequest:
    """The priority of a stream is not passed on."""
    return dataclasses.replace(request, priority=0)


@streamed_mutant("sampling/without_a_seed_nothing_repeats", says="two of these were drawn alike")
def seeds_streams_by_their_prompt(request: GenerateRequest) -> GenerateRequest:
    """Streams of one prompt without a seed draw the same tokens."""
    return dataclasses.replace(request, seed=request.seed or 1)


# With an adapter -----------------------------------------------------------------------------------------------------


@mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="a prompt logprob is")
class scores_prompts_by_the_base(CorrectBackend):
    """Prompt logprobs are always the base model's, even with an adapter."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.lora is None or request.params.prompt_logprobs is None:
            return result
        base = await super().generate(dataclasses.replace(request, request_id=f"base-{request.request_id}", lora=None))
        return dataclasses.replace(result, prompt_logprobs=base.prompt_logprobs)


@request_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="a prompt logprob is")
def scores_alone_by_the_base(request: GenerateRequest) -> GenerateRequest:
    """With max_new_tokens=0 prompt logprobs are the base model's, even with an adapter."""
    return request if request.max_new_tokens else dataclasses.replace(request, lora=None)


@params_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="with an adapter, token")
def drops_masks_beside_an_adapter(request: GenerateRequest) -> Mapping[str, object]:
    """Logit processors have no effect in a request that names an adapter."""
    return {"logit_processors": ()} if request.lora else {}


@mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
class loses_adapters_asleep(CorrectBackend):
    """After a sleep requests with an adapter are answered by the base model."""

    loses_them = frozenset(MemoryTag)
    slept = False

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        self.slept = self.slept or not tags.isdisjoint(self.loses_them)
        await super().sleep(tags)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await super().generate(dataclasses.replace(request, lora=None if self.slept else request.lora))


@mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
class loses_adapters_with_the_weights(loses_adapters_asleep):
    """After a sleep of the weights and an update, requests with an adapter are answered by the base model."""

    loses_them = frozenset({MemoryTag.WEIGHTS})


# Beyond a limit ------------------------------------------------------------------------------------------------------


@request_mutant("lifecycle/two_in_a_row_leave_nothing", says="drew the same tokens")
def draws_alike_in_every_engine(request: GenerateRequest) -> GenerateRequest:
    """A request without a seed gets one that follows from its prompt."""
    return dataclasses.replace(request, seed=sum(request.prompt_token_ids) if request.seed is None else request.seed)


@request_mutant("sampling/another_seed_draws_otherwise", says="alike")
def takes_seeds_modulo_32_bits(request: GenerateRequest) -> GenerateRequest:
    """Only the lower 32 bits of a seed are passed on."""
    return dataclasses.replace(request, seed=None if request.seed is None else request.seed % 2**32)


@request_mutant("sampling/another_seed_draws_otherwise", says="draw alike")
def takes_seeds_as_floats_of_the_penalised(request: GenerateRequest) -> GenerateRequest:
    """With a frequency penalty, the seed passes through a float64, which keeps 53 bits of it."""
    if request.seed is None or not request.params.frequency_penalty:
        return request
    return dataclasses.replace(request, seed=min(int(float(request.seed)), 2**63 - 1))


@params_mutant("sampling/greedy_follows_the_logit_bias", says="below the best after penalties and bias")
def passes_on_a_hundred_biases(request: GenerateRequest) -> Mapping[str, object]:
    """Only the first 100 tokens of a logit_bias are passed on."""
    return {"logit_bias": dict([*request.params.logit_bias.items()][:100])}


@mutant("sessions/a_prompt_is_found_again", says="nats below")
class penalises_no_cached_prompt(CorrectBackend):
    """A repetition penalty has no effect if the prompt is cached."""

    _cached: set[tuple[int, ...]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        prompt = tuple(request.prompt_token_ids)
        if prompt in self._cached:
            params = request.params.model_copy(update={"repetition_penalty": 1.0})
            request = dataclasses.replace(request, params=params)
        self._cached.add(prompt)
        return await super().generate(request)


@params_mutant("sampling/processors_act_together", says=("below the best", "leaves a mask"))
def unites_action_masks(request: GenerateRequest) -> Mapping[str, object]:
    """Each of several action masks allows the tokens of all."""
    processors = request.params.logit_processors
    masks = [one for one in processors if isinstance(one, ActionMask)]
    if len(masks) < 2:
        return {}
    united = ActionMask(allowed_token_ids=tuple({token for mask in masks for token in mask.allowed_token_ids}))
    return {"logit_processors": (united, *(one for one in processors if not isinstance(one, ActionMask)))}


@params_mutant("sampling/processors_act_together", says=("below the best", "leaves a mask", "holds a disallowed id"))
def keeps_the_last_mask(request: GenerateRequest) -> Mapping[str, object]:
    """Only the last of several action masks, or lists of disallowed ids, is applied."""
    return {"logit_processors": _last_of_each_kind(request.params.logit_processors, (ActionMask, DisallowedTokens))}


@params_mutant("sampling/a_temperature_schedule_moves_from_start_to_end", says="nats off")
def keeps_the_last_schedule(request: GenerateRequest) -> Mapping[str, object]:
    """Only the last of several temperature schedules is applied."""
    return {"logit_processors": _last_of_each_kind(request.params.logit_processors, (TemperatureSchedule,))}


def _last_of_each_kind(
    processors: Sequence[LogitProcessor], kinds: tuple[type[LogitProcessor], ...]
) -> tuple[LogitProcessor, ...]:
    last = {type(one): one for one in processors}
    return tuple(one for one in processors if not isinstance(one, kinds) or one is last[type(one)])


@params_mutant("stop/a_stop_regex_ends_generation_at_the_first_text_that_has_a_match", says="did not end a text of")
def passes_on_a_few_stop_regexes(request: GenerateRequest) -> Mapping[str, object]:
    """Only the first 8 stop regexes end a completion."""
    return {"stop_regex": request.params.stop_regex[:8]}


@params_mutant("stop/a_stop_string_ends_generation_at_its_first_match", says="did not end a text of")
def passes_on_short_stop_strings(request: GenerateRequest) -> Mapping[str, object]:
    """Stop strings of more than 128 characters end nothing."""
    return {"stop": tuple(stop for stop in request.params.stop if len(stop) <= 128)}


@mutant("stop/a_stop_regex_ends_generation_at_the_first_text_that_has_a_match", says="did not end a text of")
class looks_for_regexes_in_the_last_characters(CorrectBackend):
    """A stop regex is looked for in the last 64 characters of the text."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        patterns = request.params.stop_regex
        if not patterns or request.params.stop:
            return await super().generate(request)
        params = request.params.model_copy(update={"stop_regex": (), "include_stop_str_in_output": False})
        free = await super().generate(dataclasses.replace(request, params=params))
        decode = partial(Tokenizer.load(self.config), skip_special_tokens=params.skip_special_tokens)
        for count in range(max(1, params.min_new_tokens), len(free.token_ids) + 1):
            seen = decode(free.token_ids[:count])[-64:]
            if any(re.search(pattern, seen) for pattern in patterns):
                return dataclasses.replace(cut(free, count), matched_stop=None)
        whole = MatchedText(decode(free.token_ids), len(free.token_ids))
        return free if free.matched_stop is not None else dataclasses.replace(free, matched_text=whole)


@result_mutant("sampling/each_step_is_drawn_anew", says="a sample draws the same ones again")
def draws_the_same_again(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """At a high temperature the random numbers of a sample repeat after 128 tokens."""
    ids = result.token_ids
    if request.params.temperature < 100:
        return result
    return dataclasses.replace(result, token_ids=[ids[at % 128] for at in range(len(ids))])


@params_mutant("errors/more_alternatives_than_tokens_are_refused", says="logprobs=200 alternatives were asked for")
def caps_alternatives(request: GenerateRequest) -> Mapping[str, object]:
    """At most 20 alternatives of a token are returned."""
    return {"logprobs": request.params.logprobs and min(request.params.logprobs, 20)}


@params_mutant("sampling/top_k_keeps_the_k_most_likely", says="with top_k=200 no token beyond the")
def caps_top_k(request: GenerateRequest) -> Mapping[str, object]:
    """top_k keeps at most 64 tokens."""
    return {"top_k": request.params.top_k and min(request.params.top_k, 64)}


@params_mutant("sampling/a_high_temperature_flattens", says="the draws do not follow")
def caps_the_temperature(request: GenerateRequest) -> Mapping[str, object]:
    """A temperature above 2 is reduced to 2."""
    return {"temperature": min(request.params.temperature, 2.0)}


@result_mutant("sampling/logit_bias_is_added", says="draws found")
def draws_with_a_coarse_random_number(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """At a high temperature one unlikely token in 32 is drawn, in place of its 31 neighbours too."""
    bias = request.params.logit_bias
    if request.params.temperature < 2 or not bias:
        return result
    return dataclasses.replace(result, token_ids=[t if t in bias else t // 32 * 32 for t in result.token_ids])


@params_mutant("sampling/a_low_temperature_sharpens", says="the draws do not follow")
def raises_low_temperatures(request: GenerateRequest) -> Mapping[str, object]:
    """A temperature below 0.05 is raised to 0.05."""
    return {"temperature": request.params.temperature and max(request.params.temperature, 0.05)}


@params_mutant("sampling/greedy_follows_the_logit_bias", says="below the best after penalties and bias")
def caps_biases(request: GenerateRequest) -> Mapping[str, object]:
    """Biases are cut to 100 and -100, the largest that the OpenAI API takes."""
    return {"logit_bias": {token: max(-100.0, min(100.0, bias)) for token, bias in request.params.logit_bias.items()}}


@params_mutant("sampling/greedy_follows_the_repetition_penalty", says="below the best after penalties and bias")
def caps_the_repetition_penalty(request: GenerateRequest) -> Mapping[str, object]:
    """A repetition penalty above 2 is reduced to 2."""
    return {"repetition_penalty": min(request.params.repetition_penalty, 2.0)}


@params_mutant("sampling/greedy_follows_the_repetition_penalty", says="below the best after penalties and bias")
def penalises_the_end_of_a_prompt(request: GenerateRequest) -> Mapping[str, object]:
    """A repetition penalty hardly counts tokens that a long prompt holds only at its beginning."""
    penalty, prompt = request.params.repetition_penalty, request.prompt_token_ids
    if penalty == 1:
        return {}
    forgotten = set(prompt[:-64]) - set(prompt[-64:])
    return {"logit_bias": {**request.params.logit_bias, **dict.fromkeys(forgotten, penalty - 1)}}


@params_mutant("sampling/greedy_follows_penalties_and_bias_together", says="below the best after penalties and bias")
def penalises_the_beginning_of_a_prompt(request: GenerateRequest) -> Mapping[str, object]:
    """A repetition penalty hardly counts tokens that a prompt holds only after its first 512."""
    params, prompt = request.params, request.prompt_token_ids
    if params.repetition_penalty == 1:
        return {}
    forgotten, more = set(prompt[512:]) - set(prompt[:512]), 4 * (params.repetition_penalty - 1)
    bias = {token: params.logit_bias.get(token, 0.0) + more for token in forgotten}
    return {"logit_bias": {**params.logit_bias, **bias}}


def _first_ids(processor: LogitProcessor) -> LogitProcessor:
    match processor:
        case ActionMask():
            return processor.model_copy(update={"allowed_token_ids": processor.allowed_token_ids[:128]})
        case DisallowedTokens():
            return processor.model_copy(update={"token_ids": processor.token_ids[:128]})
        case TemperatureSchedule():
            return processor


@params_mutant("sampling/disallowed_tokens_are_never_drawn", says="inf below the best after penalties and bias")
def disallows_a_hundred_tokens(request: GenerateRequest) -> Mapping[str, object]:
    """Only the first 128 ids of a logit processor count."""
    return {"logit_processors": tuple(map(_first_ids, request.params.logit_processors))}


@params_mutant("sampling/an_action_mask_allows_nothing_else", says="below the best after penalties and bias")
def allows_a_hundred_tokens(request: GenerateRequest) -> Mapping[str, object]:
    """Only the first 128 ids of a mask are allowed."""
    masks = (ActionMask,)
    processors = request.params.logit_processors
    return {"logit_processors": tuple(_first_ids(one) if isinstance(one, masks) else one for one in processors)}


@params_mutant("logprob/processed_is_the_distribution_drawn_from", says="in mode processed at temperature 1000 is")
def takes_high_temperatures_for_500(request: GenerateRequest) -> Mapping[str, object]:
    """A temperature above 500 is taken as 500."""
    return {"temperature": min(request.params.temperature, 500.0)}


@request_mutant("generate/higher_priority_starts_sooner", says="assert ended == sorted(ended, reverse=True)")
def takes_negative_priorities_for_none(request: GenerateRequest) -> GenerateRequest:
    """A priority below 0 is taken for 0."""
    return dataclasses.replace(request, priority=max(0, request.priority))


# With another field, or a file ---------------------------------------------------------------------------------------


@mutant("abort/what_waits_its_turn_can_be_aborted", says="it began after the weights were renamed")
class labels_requests_as_they_come(CorrectBackend):
    """The first tokens of a request carry the weight version that was served when it was submitted."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._label = config.weight_version

    async def set_weight_version(self, version: str) -> None:
        await super().set_weight_version(version)
        self._label = version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        label = self._label
        result = await super().generate(request)
        spans = [dataclasses.replace(span, version=label) for span in result.weight_versions[:1]]
        return dataclasses.replace(result, weight_versions=[*spans, *result.weight_versions[1:]])


@mutant("sleep/weights_can_change_while_the_cache_sleeps", says="and its completions are labelled ['initial']")
class forgets_the_label_asleep(CorrectBackend):
    """Once the KV cache wakes up, tokens carry the label that the engine started with."""

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await super().wake_up(tags)
        if MemoryTag.KV_CACHE in tags:
            await super().set_weight_version(self.config.weight_version)


@mutant("logprob/processed_follows_everything_at_once", says="in mode processed at temperature")
class forbids_eos_though_it_is_ignored(KnowingEos):
    """A completion of a fixed length (min_new_tokens is max_new_tokens) never holds EOS, also with ignore_eos."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        params = request.params
        if params.ignore_eos and params.min_new_tokens == request.max_new_tokens:
            processors = (*params.logit_processors, DisallowedTokens(token_ids=self.eos))
            params = params.model_copy(update={"logit_processors": processors})
        return await super().generate(dataclasses.replace(request, params=params))


@result_mutant("logprob/top_logprobs_after_temperature", says="expected logprobs")
def counts_the_drawn_token_among_the_alternatives(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """With a repetition penalty, an unlikely token that was drawn takes the place of the last alternative."""
    if request.params.repetition_penalty == 1 or not result.top_logprobs or result.logprobs is None:
        return result
    top = [
        alternatives if token in dict(alternatives) else [*alternatives[:-1], (token, logprob)]
        for token, logprob, alternatives in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True)
    ]
    return dataclasses.replace(result, top_logprobs=top)


@mutant("stop/stop_token_ids_hold_where_eos_is_ignored", says="EOS ended it beside another")
class heeds_eos_beside_named_stops(KnowingEos):
    """In a request with stop token ids EOS ends generation despite ignore_eos."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        ends = request.stop_token_ids and tuple({*request.stop_token_ids, *self.eos})
        return await super().generate(dataclasses.replace(request, stop_token_ids=ends))


@mutant("generate/every_file_that_names_an_end_is_heeded", says="the generation config's sampling is used")
class takes_the_generation_configs_temperature(CorrectBackend):
    """A request with the default temperature is sampled at generation_config.json's temperature."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        file = Path(config.model) / "generation_config.json"
        self._default = float(json.loads(file.read_text()).get("temperature", 1.0)) if file.is_file() else 1.0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.params.temperature != 1:
            return await super().generate(request)
        params = request.params.model_copy(update={"temperature": self._default})
        return await super().generate(dataclasses.replace(request, params=params))


@mutant("generate/every_file_that_names_an_end_is_heeded", says=("nats below", "the generation config's sampling is"))
class takes_the_generation_configs_repetition_penalty(CorrectBackend):
    """A request without a repetition penalty gets generation_config.json's penalty."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        file = Path(config.model) / "generation_config.json"
        self._default = float(json.loads(file.read_text()).get("repetition_penalty", 1.0)) if file.is_file() else 1.0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.params.repetition_penalty != 1:
            return await super().generate(request)
        params = request.params.model_copy(update={"repetition_penalty": self._default})
        return await super().generate(dataclasses.replace(request, params=params))


@request_mutant("stop/a_stop_token_id_ends_generation", says="expected Ending(")
def passes_on_a_few_stop_ids(request: GenerateRequest) -> GenerateRequest:
    """Only the first 64 stop token ids end a completion."""
    return dataclasses.replace(request, stop_token_ids=request.stop_token_ids[:64])


@request_mutant("stop/a_stop_token_id_ends_generation", says="expected Ending(")
def passes_on_128_stop_ids(request: GenerateRequest) -> GenerateRequest:
    """Only the first 128 stop token ids end a completion."""
    return dataclasses.replace(request, stop_token_ids=request.stop_token_ids[:128])


@mutant("sampling/greedy_follows_the_frequency_penalty", says="below the best after penalties and bias")
class forgets_what_was_drawn_long_ago(CorrectBackend):
    """A frequency penalty ignores tokens more than 64 positions back."""

    remembered = 64

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if not request.params.frequency_penalty or request.max_new_tokens <= self.remembered:
            return await super().generate(request)
        first = await super().generate(dataclasses.replace(request, max_new_tokens=self.remembered))
        if first.finish_reason is not FinishReason.LENGTH:
            return first
        return joined(first, await self.generate(after(request, first)))


@mutant("sampling/greedy_follows_penalties_and_bias_together", says="below the best after penalties and bias")
class forgets_what_was_drawn_very_long_ago(forgets_what_was_drawn_long_ago):
    """A frequency penalty ignores tokens more than 256 positions back."""

    remembered = 256


@request_mutant("logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0.8 is")
def holds_back_before_it_counts(request: GenerateRequest) -> GenerateRequest:
    """Before min_new_tokens, logprobs in mode temperature leave EOS out of the distribution."""
    masks = request.params.min_new_tokens and request.logprobs_mode is LogprobsMode.TEMPERATURE
    return dataclasses.replace(request, logprobs_mode=LogprobsMode.PROCESSED) if masks else request


@params_mutant("stop/no_stop_token_id_before_min_new_tokens", says="assert len(completion.token_ids) > least")
def holds_back_eos_alone(request: GenerateRequest) -> Mapping[str, object]:
    """min_new_tokens has an effect only where EOS ends a request."""
    return {"min_new_tokens": 0} if request.params.ignore_eos else {}


@params_mutant("logprob/prompt_logprobs_name_the_likely_tokens", says="expected 3 tokens, got 1")
def gives_a_prompt_the_alternatives_of_its_output(request: GenerateRequest) -> Mapping[str, object]:
    """A prompt's tokens come with as many alternatives as were asked for the output's."""
    params = request.params
    return {"prompt_logprobs": params.logprobs} if params.logprobs and params.prompt_logprobs is not None else {}


@params_mutant("sampling/processors_act_together", says="below the best after penalties and bias")
def disallows_tokens_by_a_bias(request: GenerateRequest) -> Mapping[str, object]:
    """Disallowed tokens get a bias of -100, so a larger bias of the request allows them again."""
    ruled_out, bias = request.params.disallowed_token_ids, request.params.logit_bias
    others = tuple(one for one in request.params.logit_processors if not isinstance(one, DisallowedTokens))
    lowered = {token: bias.get(token, 0.0) - 100.0 for token in ruled_out}
    return {"logit_processors": others, "logit_bias": {**bias, **lowered}}


# Version boundaries --------------------------------------------------------------------------------------------------


def _labelled_early(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    if len(result.weight_versions) != 2:
        return result
    before, after = result.weight_versions
    spans = [VersionSpan(before.version, 0, before.end - 1), VersionSpan(after.version, after.start - 1, after.end)]
    return dataclasses.replace(result, weight_versions=spans)


@result_mutant("weight_sync/frozen_requests_go_on_where_they_were", says="which took over with token")
def labels_the_last_old_token_as_new(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The last token of the old weights carries the new version."""
    return _labelled_early(request, result)


@result_mutant("weight_sync/a_pinned_request_is_of_its_version", says="a version that was replaced in flight")
def labels_all_tokens_as_old(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Tokens that were made after a new label carry the old one."""
    spans = [dataclasses.replace(span, end=len(result.token_ids)) for span in result.weight_versions[:1]]
    return dataclasses.replace(result, weight_versions=spans)


@result_mutant("weight_sync/a_new_label_divides_what_is_in_flight", says="tokens were made before the new label, and")
def labels_a_token_before_its_time(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The last token before a new label already carries it."""
    return _labelled_early(request, result)


@mutant("weight_sync/frozen_requests_go_on_where_they_were", says="on the cache that the old ones")
class retracts_what_it_freezes_in_place(CorrectBackend):
    """A request frozen in place loses its cache, which the new weights recompute."""

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(PauseMode.RETRACT if mode is PauseMode.IN_PLACE else mode)


# With hidden states and grammars -------------------------------------------------------------------------------------


@request_mutant("lora/logprobs_are_those_with_the_adapter", says=("nats below", "a hidden state is off by"))
def forgets_the_adapter_where_states_are_asked_for(request: GenerateRequest) -> GenerateRequest:
    """A request that asks for hidden states is computed without its adapter."""
    return dataclasses.replace(request, lora=None) if request.params.return_hidden_states else request


@mutant("hidden_states/states_do_not_depend_on_the_batch_or_the_cache", says="a state is off by")
class hands_states_out_by_their_order(KnowingRequests):
    """Beside a request that asks for no hidden states, other requests get the states of a wrong row."""

    _without: set[str] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if not request.params.return_hidden_states:
            self._without.add(request.request_id)
        result = await super().generate(request)
        beside, states = self._without & self.flying, result.hidden_states
        self._without.discard(request.request_id)
        return dataclasses.replace(result, hidden_states=states[::-1]) if beside and states else result


@retracted_mutant("hidden_states/states_do_not_depend_on_the_batch_or_the_cache", says="expected states of shape")
def forgets_states_from_before_a_retraction(request: GenerateRequest) -> GenerateRequest | None:
    """A retracted request has only the hidden states of the tokens since then."""
    return request if request.params.return_hidden_states else None


@params_mutant("structured_output/processed_logprobs_are_those_within_the_grammar", says="within the grammar, with")
def penalises_no_repetition_within_a_grammar(request: GenerateRequest) -> Mapping[str, object]:
    """A repetition penalty has no effect beside a grammar."""
    return {} if request.params.structured_output is None else {"repetition_penalty": 1.0}


@spoiled_backend(caught_by="structured_output/json_follows_the_schema", says="is not of the schema")
def finds_schemas_by_their_title(backend: type[Backend]) -> type[Backend]:
    """Compiled JSON schemas are kept by their title, so that the next schema with that title is not compiled."""
    known: dict[str, JsonSchema] = {}

    def change(request: GenerateRequest) -> GenerateRequest:
        asked = request.params.structured_output
        read = json.loads(asked.json_schema) if isinstance(asked, JsonSchema) else None
        if not isinstance(asked, JsonSchema) or not isinstance(read, dict) or "title" not in read:
            return request
        kept = known.setdefault(read["title"], asked)
        return dataclasses.replace(request, params=request.params.model_copy(update={"structured_output": kept}))

    return asking(backend, change)


@mutant("generate/greedy_takes_the_most_likely_token", says=("nats below", "nats off"))
class attends_to_padding_in_a_grown_cache(KnowingRequests):
    """After 128 tokens a sample beside other requests attends to padding before its prompt."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        room = request.max_new_tokens - 128
        if room <= 0 or not self.flying:
            return await super().generate(request)
        first = await super().generate(dataclasses.replace(request, max_new_tokens=128))
        if first.finish_reason is not FinishReason.LENGTH:
            return first
        rest = after(request, first)
        prompt = [*rest.prompt_token_ids[:1] * 8, *rest.prompt_token_ids]
        padded = dataclasses.replace(rest, prompt_token_ids=prompt, max_new_tokens=room - 8)
        return joined(first, await super().generate(padded))


@mutant("weight_sync/a_frozen_request_leaves_no_stale_prefix", says="tokens were found that older weights had cached")
class keeps_the_cache_of_the_aborted(CorrectBackend):
    """The prompt of an aborted request is found in the cache, though older weights had computed it."""

    _left_in_cache: set[tuple[int, ...]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        prompt = tuple(request.prompt_token_ids)
        if result.finish_reason is FinishReason.ABORT:
            self._left_in_cache.add(prompt)
        elif prompt in self._left_in_cache:
            return dataclasses.replace(result, cached_tokens=max(result.cached_tokens, len(prompt) // 2))
        return result
