"""Fields of a request that are lost on their way to the engine, or changed."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import cast

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain.types.weights import CommitUpdate, WeightMessage, WeightReply
from drivetrain_conformance.mutants.drawn.numbers import in_float16
from drivetrain_conformance.mutants.registry import backend_mutants, mutant
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    KnowingEos,
    after,
    joined,
    own,
    params_mutant,
    request_mutant,
    resubmitting,
    token_by_token,
)

_LARGEST = 2**63 - 1
_LATE = 182

# Lost fields ---------------------------------------------------------------------------------------------------------


@params_mutant("generate/min_new_tokens_keeps_eos_away", says="min_new_tokens=1: EOS in")
def drops_min_new_tokens(_: GenerateRequest) -> Mapping[str, object]:
    """The field min_new_tokens is not passed on."""
    return {"min_new_tokens": 0}


@params_mutant("sampling/greedy_follows_the_logit_bias", says="below the best after penalties and bias")
def drops_logit_bias(_: GenerateRequest) -> Mapping[str, object]:
    """The field logit_bias is not passed on."""
    return {"logit_bias": {}}


@params_mutant("sampling/top_k_of_one_is_greedy", says="below the best after penalties and bias")
def drops_top_k(_: GenerateRequest) -> Mapping[str, object]:
    """The field top_k is not passed on."""
    return {"top_k": 0}


@params_mutant("logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0.004 is")
def takes_a_low_temperature_for_none(request: GenerateRequest) -> Mapping[str, object]:
    """A temperature below 0.01 is taken for 0, that is greedy."""
    return {"temperature": 0.0} if request.params.temperature < 0.01 else {}


@params_mutant("logprob/top_logprobs_after_temperature", says="expected logprobs [")
def takes_low_temperatures_for_a_hundredth(request: GenerateRequest) -> Mapping[str, object]:
    """A temperature below 0.01 is taken as 0.01."""
    temperature = request.params.temperature
    return {"temperature": max(temperature, 0.01)} if temperature else {}


@params_mutant("sampling/min_p_of_one_is_greedy", says="below the best after penalties and bias")
def drops_min_p(_: GenerateRequest) -> Mapping[str, object]:
    """The field min_p is not passed on."""
    return {"min_p": 0.0}


@params_mutant(
    "logprob/processed_follows_everything_at_once",
    says=("in mode processed at temperature", "has probability zero and was drawn"),
)
def drops_min_p_beside_top_k(request: GenerateRequest) -> Mapping[str, object]:
    """The field min_p has an effect only without top_k."""
    return {"min_p": 0.0} if request.params.top_k else {}


@params_mutant("sampling/greedy_follows_the_presence_penalty", says="below the best after penalties and bias")
def drops_the_presence_penalty(_: GenerateRequest) -> Mapping[str, object]:
    """The field presence_penalty is not passed on."""
    return {"presence_penalty": 0.0}


@params_mutant("sampling/greedy_follows_the_repetition_penalty", says="below the best after penalties and bias")
def drops_the_repetition_penalty(_: GenerateRequest) -> Mapping[str, object]:
    """The field repetition_penalty is not passed on."""
    return {"repetition_penalty": 1.0}


@request_mutant("stop/a_stop_token_id_ends_generation", says="matched_stop=None")
def drops_stop_token_ids(request: GenerateRequest) -> GenerateRequest:
    """Only the model's own EOS ids end generation."""
    own = request.params.stop_token_ids
    return dataclasses.replace(request, stop_token_ids=tuple(i for i in request.stop_token_ids if i not in own))


@mutant("generate/ignore_eos_goes_on_past_it", says="assert len(completion.token_ids) == 12")
class drops_ignore_eos(KnowingEos):
    """EOS ends generation even with ignore_eos."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        ends = tuple({*request.stop_token_ids, *self.eos})
        return await super().generate(dataclasses.replace(request, stop_token_ids=ends))


@mutant("stop/stop_token_ids_hold_where_eos_is_ignored", says="an EOS among the stop token ids did not end it")
class ignores_an_eos_that_is_named(KnowingEos):
    """With ignore_eos, an EOS among the request's own stop token ids is dropped."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.params.ignore_eos:
            stops = tuple(one for one in request.stop_token_ids if one not in self.eos)
            request = dataclasses.replace(request, stop_token_ids=stops)
        return await super().generate(request)


@request_mutant("sampling/a_seed_fixes_the_output", says="4 of 4 outputs differ")
def drops_the_seed(request: GenerateRequest) -> GenerateRequest:
    """A request's seed is not passed on."""
    return dataclasses.replace(request, seed=None)


@request_mutant("generate/higher_priority_starts_sooner", says="assert ended == sorted(ended, reverse=True)")
def drops_the_priority(request: GenerateRequest) -> GenerateRequest:
    """A request's priority is not passed on."""
    return dataclasses.replace(request, priority=0)


@request_mutant(
    "generate/higher_priority_starts_sooner",
    says=("assert ended == sorted(ended, reverse=True)", "ran after others of lower priority"),
)
def turns_priority_round(request: GenerateRequest) -> GenerateRequest:
    """A lower priority starts sooner, as in some engines."""
    return dataclasses.replace(request, priority=-request.priority)


# Changed fields ------------------------------------------------------------------------------------------------------


@params_mutant("sampling/temperature_one_draws_from_the_model", says="the draws do not follow the distribution")
def samples_greedily(_: GenerateRequest) -> Mapping[str, object]:
    """The temperature is ignored: each token is the most likely one."""
    return {"temperature": 0.0}


@params_mutant("sampling/a_low_temperature_sharpens", says="the draws do not follow the distribution")
def applies_temperature_twice(request: GenerateRequest) -> Mapping[str, object]:
    """Logits are divided by the temperature in the adapter and again in its engine."""
    return {"temperature": request.params.temperature**2}


@params_mutant("sampling/top_p_keeps_the_nucleus", says="the draws do not follow the distribution")
def samples_with_a_smaller_top_p(request: GenerateRequest) -> Mapping[str, object]:
    """The nucleus ends before the token that reaches p, not after it."""
    return {"top_p": request.params.top_p * 0.8}


@params_mutant("sampling/top_k_of_one_is_greedy", says="below the best after penalties and bias")
def samples_from_one_token_too_many(request: GenerateRequest) -> Mapping[str, object]:
    """top_k keeps k + 1 tokens."""
    return {"top_k": request.params.top_k and request.params.top_k + 1}


@params_mutant("sampling/greedy_follows_the_frequency_penalty", says="below the best after penalties and bias")
def takes_frequency_for_presence(request: GenerateRequest) -> Mapping[str, object]:
    """The frequency penalty counts a token once, however often it was generated."""
    return {"presence_penalty": request.params.frequency_penalty, "frequency_penalty": 0.0}


@mutant("sampling/greedy_follows_the_frequency_penalty", says="below the best after penalties and bias")
class counts_a_token_eight_times(CorrectBackend):
    """The frequency penalty counts each token at most eight times."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        penalty, bias = request.params.frequency_penalty, request.params.logit_bias
        if not penalty:
            return await super().generate(request)

        def penalised(left: GenerateRequest, token_ids: list[int]) -> GenerateRequest:
            counts = Counter(token_ids)
            less = {token: bias.get(token, 0.0) - penalty * min(count, 8) for token, count in counts.items()}
            fields = {"frequency_penalty": 0.0, "logit_bias": {**bias, **less}}
            return dataclasses.replace(left, params=left.params.model_copy(update=fields))

        return await token_by_token(super().generate, request, penalised)


@request_mutant("sampling/another_seed_draws_otherwise", says="two of these were drawn alike")
def gives_all_samples_one_seed(request: GenerateRequest) -> GenerateRequest:
    """All samples of a prompt use the same seed, and so are equal."""
    return dataclasses.replace(request, seed=request.params.seed)


@request_mutant("sampling/another_seed_draws_otherwise", says="two of these were drawn alike")
def sends_seeds_as_doubles(request: GenerateRequest) -> GenerateRequest:
    """A seed passes through a double, which drops the low bits of large ones."""
    return _as_a_double(request)


def _as_a_double(request: GenerateRequest) -> GenerateRequest:
    seed = None if request.seed is None else min(int(float(request.seed)), _LARGEST)
    return dataclasses.replace(request, seed=seed)


def _resumed(request: GenerateRequest, made: GenerateResult) -> GenerateRequest:
    return dataclasses.replace(after(request, made), resumed_tokens=request.resumed_tokens + len(made.token_ids))


_frozen_mutant = backend_mutants(partial(resubmitting, PauseMode.IN_PLACE, left=_resumed))
_retracted_mutant = backend_mutants(partial(resubmitting, PauseMode.RETRACT, left=_resumed))


@mutant("sampling/another_seed_draws_otherwise", says="draw alike")
class sends_seeds_as_doubles_late(CorrectBackend):
    """After 182 tokens of a request, its seed passes through a double."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.seed is None or request.max_new_tokens <= _LATE:
            return await super().generate(request)
        first = await super().generate(dataclasses.replace(request, max_new_tokens=_LATE))
        if len(first.token_ids) < _LATE or first.finish_reason is not FinishReason.LENGTH:
            return first
        return joined(first, await super().generate(_as_a_double(_resumed(request, first))))


@_retracted_mutant("sampling/another_seed_draws_otherwise", says="draw alike")
def sends_seeds_as_doubles_once_retracted(request: GenerateRequest) -> GenerateRequest | None:
    """The seed of a retracted request passes through a double."""
    return None if request.seed is None else _as_a_double(request)


@_frozen_mutant("pause/in_place_freezes_requests_in_flight", says="has the logprob")
def rounds_temperatures_once_frozen(request: GenerateRequest) -> GenerateRequest | None:
    """The temperature of a request frozen in place that biases tokens is rounded to float16."""
    return _at_a_rounded_temperature(request)


@_retracted_mutant("pause/retract_freezes_requests_in_flight", says="has the logprob")
def rounds_temperatures_once_retracted(request: GenerateRequest) -> GenerateRequest | None:
    """The temperature of a retracted request that biases tokens is rounded to float16."""
    return _at_a_rounded_temperature(request)


def _at_a_rounded_temperature(request: GenerateRequest) -> GenerateRequest | None:
    params = request.params
    if not (params.temperature and params.logit_bias) or params.stop or params.stop_regex:
        return None
    rounded = in_float16(params.temperature) or params.temperature
    return dataclasses.replace(request, params=params.model_copy(update={"temperature": rounded}))


@mutant("sampling/another_seed_draws_otherwise", says="tokens later what the other does")
class adds_the_step_to_the_seed(CorrectBackend):
    """A token's random number depends on the sum of seed and step, so that sample i + 1 repeats sample i."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        seed = request.seed
        if seed is None or request.params.temperature == 0:
            return await super().generate(request)

        def seeded(left: GenerateRequest, token_ids: list[int]) -> GenerateRequest:
            return dataclasses.replace(left, seed=(seed + len(token_ids)) % 2**63)

        return await token_by_token(super().generate, request, seeded)


@request_mutant("sampling/without_a_seed_nothing_repeats", says="two of these were drawn alike")
def always_draws_the_same(request: GenerateRequest) -> GenerateRequest:
    """A request without a seed gets a constant one, so that all its samples are equal."""
    return dataclasses.replace(request, seed=request.seed or 42)


@mutant("sampling/without_a_seed_nothing_repeats", says="two of these were drawn alike")
class repeats_draws_in_large_batches(CorrectBackend):
    """A request without a seed, in a batch of more than 32, draws as the one 32 places before it does."""

    beside = 0
    first = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if not self.beside:
            self.first = secrets.randbits(40)
        if request.seed is None:
            request = dataclasses.replace(request, seed=self.first + self.beside % 32)
        self.beside += 1
        try:
            return await super().generate(request)
        finally:
            self.beside -= 1


@mutant("sampling/another_seed_draws_otherwise", says="two of these were drawn alike")
class repeats_seeds_in_large_batches(CorrectBackend):
    """A request with a seed, in a batch of more than 32, draws as the one 32 places before it does."""

    _seeds: list[int] = own(list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.seed is None:
            return await super().generate(request)
        if len(self._seeds) >= 32:
            request = dataclasses.replace(request, seed=self._seeds[-32])
        self._seeds.append(seed := cast(int, request.seed))
        try:
            return await super().generate(request)
        finally:
            self._seeds.remove(seed)


@mutant("sampling/a_seed_fixes_the_output", says="3 of 4 outputs differ")
class seeds_by_place_in_the_batch(CorrectBackend):
    """A seeded draw depends on the number of concurrent requests."""

    beside = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.seed is not None:
            request = dataclasses.replace(request, seed=request.seed + self.beside)
        self.beside += 1
        try:
            return await super().generate(request)
        finally:
            self.beside -= 1


@request_mutant("generate/at_most_max_new_tokens", says="assert len(completion.token_ids) <= count")
def generates_one_token_too_many(request: GenerateRequest) -> GenerateRequest:
    """A completion may be one token longer than max_new_tokens."""
    return dataclasses.replace(request, max_new_tokens=request.max_new_tokens + 1)


@request_mutant("generate/greedy_takes_the_most_likely_token", says="nats below the most likely one")
def loses_the_first_prompt_token(request: GenerateRequest) -> GenerateRequest:
    """The first prompt token is dropped, as a BOS that the engine would add by itself."""
    return dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[1:] or [0])


@request_mutant("generate/greedy_takes_the_most_likely_token", says="nats below the most likely one")
def sees_the_end_of_long_prompts_only(request: GenerateRequest) -> GenerateRequest:
    """The model sees only the last 64 tokens of a prompt."""
    return dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[-64:])


@mutant("generate/eos_comes_right_after_min_new_tokens", says="EOS came after")
class takes_min_new_tokens_of_a_neighbour(CorrectBackend):
    """A request with a frequency penalty has the min_new_tokens of the first request in flight."""

    _flying: list[GenerateRequest] = own(list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        asked = request
        if self._flying and request.params.frequency_penalty:
            least = min(self._flying[0].params.min_new_tokens, request.max_new_tokens)
            asked = dataclasses.replace(request, params=request.params.model_copy(update={"min_new_tokens": least}))
        self._flying.append(request)
        try:
            return await super().generate(asked)
        finally:
            self._flying.remove(request)


@params_mutant("sampling/a_small_top_p_is_greedy", says="cannot be drawn")
def raises_a_small_top_p(request: GenerateRequest) -> Mapping[str, object]:
    """A top_p is at least 0.0216, unless it is so small that it means greedy."""
    return {"top_p": max(request.params.top_p, 0.0216)} if request.params.top_p > 1e-5 else {}


@mutant("weight_sync/a_checkpoint_folder_is_served", says="cannot be drawn")
class raises_a_small_top_p_after_an_update(CorrectBackend):
    """After an update a top_p is at least 0.0216."""

    _updated = False

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        self._updated |= isinstance(message, CommitUpdate)
        return await super().receive_weights(message)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self._updated:
            params = request.params.model_copy(update={"top_p": max(request.params.top_p, 0.0216)})
            request = dataclasses.replace(request, params=params)
        return await super().generate(request)
