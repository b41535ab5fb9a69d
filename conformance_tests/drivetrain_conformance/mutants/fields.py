"""Fields of a request that are lost on their way to the engine, or changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, ModelInfo
from drivetrain_conformance.mutants.registry import spoiled_backend
from drivetrain_conformance.mutants.spoil import SoundBackend, asking, asking_for_params, mixed

# Lost fields ---------------------------------------------------------------------------------------------------------


def _without(backend: type[Backend], field: str, default: object) -> type[Backend]:
    return asking_for_params(backend, lambda request: {field: default})


@spoiled_backend(caught_by="generate/min_new_tokens_keeps_eos_away", says="min_new_tokens=1: EOS in")
def drops_min_new_tokens(backend: type[Backend]) -> type[Backend]:
    """The field min_new_tokens is not passed on."""
    return _without(backend, "min_new_tokens", 0)


@spoiled_backend(caught_by="sampling/greedy_follows_the_logit_bias", says="below the best after penalties and bias")
def drops_logit_bias(backend: type[Backend]) -> type[Backend]:
    """The field logit_bias is not passed on."""
    return _without(backend, "logit_bias", {})


@spoiled_backend(caught_by="sampling/top_k_of_one_is_greedy", says="below the best after penalties and bias")
def drops_top_k(backend: type[Backend]) -> type[Backend]:
    """The field top_k is not passed on."""
    return _without(backend, "top_k", 0)


@spoiled_backend(caught_by="sampling/min_p_of_one_is_greedy", says="below the best after penalties and bias")
def drops_min_p(backend: type[Backend]) -> type[Backend]:
    """The field min_p is not passed on."""
    return _without(backend, "min_p", 0.0)


@spoiled_backend(
    caught_by="sampling/greedy_follows_the_presence_penalty", says="below the best after penalties and bias"
)
def drops_the_presence_penalty(backend: type[Backend]) -> type[Backend]:
    """The field presence_penalty is not passed on."""
    return _without(backend, "presence_penalty", 0.0)


@spoiled_backend(
    caught_by="sampling/greedy_follows_the_repetition_penalty", says="below the best after penalties and bias"
)
def drops_the_repetition_penalty(backend: type[Backend]) -> type[Backend]:
    """The field repetition_penalty is not passed on."""
    return _without(backend, "repetition_penalty", 1.0)


@spoiled_backend(caught_by="stop/a_stop_token_id_ends_generation", says="matched_stop=None")
def drops_stop_token_ids(backend: type[Backend]) -> type[Backend]:
    """Only the model's own EOS ids end generation."""

    def change(request: GenerateRequest) -> GenerateRequest:
        own = request.params.stop_token_ids
        return dataclasses.replace(request, stop_token_ids=tuple(i for i in request.stop_token_ids if i not in own))

    return asking(backend, change)


@spoiled_backend(caught_by="generate/ignore_eos_goes_on_past_it", says="assert len(completion.token_ids) == 12")
def drops_ignore_eos(backend: type[Backend]) -> type[Backend]:
    """EOS ends generation even with ignore_eos."""

    class Wrong(SoundBackend):
        """Always adds the model's EOS ids."""

        eos: tuple[int, ...] = ()

        async def start(self, report: Callable[[str], None]) -> ModelInfo:
            info = await super().start(report)
            self.eos = info.eos_token_ids
            return info

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return await super().generate(
                dataclasses.replace(request, stop_token_ids=tuple({*request.stop_token_ids, *self.eos}))
            )

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="sampling/a_seed_fixes_the_output", says="4 of 4 outputs differ")
def drops_the_seed(backend: type[Backend]) -> type[Backend]:
    """A request's seed is not passed on."""
    return asking(backend, lambda request: dataclasses.replace(request, seed=None))


@spoiled_backend(
    caught_by="generate/higher_priority_starts_sooner", says="assert ended == sorted(priorities, reverse=True)"
)
def drops_the_priority(backend: type[Backend]) -> type[Backend]:
    """A request's priority is not passed on."""
    return asking(backend, lambda request: dataclasses.replace(request, priority=0))


@spoiled_backend(
    caught_by="generate/higher_priority_starts_sooner",
    says=("assert ended == sorted(priorities, reverse=True)", "ran after others of lower priority"),
)
def turns_priority_round(backend: type[Backend]) -> type[Backend]:
    """A lower priority starts sooner, as in some engines."""
    return asking(backend, lambda request: dataclasses.replace(request, priority=-request.priority))


# Changed fields ------------------------------------------------------------------------------------------------------


@spoiled_backend(
    caught_by="sampling/temperature_one_draws_from_the_model", says="the draws do not follow the distribution"
)
def samples_greedily(backend: type[Backend]) -> type[Backend]:
    """The temperature is ignored: each token is the most likely one."""
    return _without(backend, "temperature", 0.0)


@spoiled_backend(caught_by="sampling/a_low_temperature_sharpens", says="the draws do not follow the distribution")
def applies_temperature_twice(backend: type[Backend]) -> type[Backend]:
    """Logits are divided by the temperature in the adapter and again in its engine."""
    return asking_for_params(backend, lambda request: {"temperature": request.params.temperature**2})


@spoiled_backend(caught_by="sampling/top_p_keeps_the_nucleus", says="the draws do not follow the distribution")
def samples_with_a_smaller_top_p(backend: type[Backend]) -> type[Backend]:
    """The nucleus ends before the token that reaches p, not after it."""
    return asking_for_params(backend, lambda request: {"top_p": request.params.top_p * 0.8})


@spoiled_backend(caught_by="sampling/top_k_of_one_is_greedy", says="below the best after penalties and bias")
def samples_from_one_token_too_many(backend: type[Backend]) -> type[Backend]:
    """top_k keeps k + 1 tokens."""
    return asking_for_params(backend, lambda request: {"top_k": request.params.top_k and request.params.top_k + 1})


@spoiled_backend(
    caught_by="sampling/greedy_follows_the_frequency_penalty", says="below the best after penalties and bias"
)
def takes_frequency_for_presence(backend: type[Backend]) -> type[Backend]:
    """The frequency penalty counts a token once, however often it was generated."""

    def change(request: GenerateRequest) -> Mapping[str, object]:
        return {"presence_penalty": request.params.frequency_penalty, "frequency_penalty": 0.0}

    return asking_for_params(backend, change)


@spoiled_backend(caught_by="sampling/another_seed_draws_otherwise", says="two of these were drawn alike")
def gives_all_samples_one_seed(backend: type[Backend]) -> type[Backend]:
    """All samples of a prompt use the same seed, and so are equal."""

    def change(request: GenerateRequest) -> GenerateRequest:
        return dataclasses.replace(request, seed=request.params.seed)

    return asking(backend, change)


@spoiled_backend(caught_by="sampling/without_a_seed_nothing_repeats", says="two of these were drawn alike")
def always_draws_the_same(backend: type[Backend]) -> type[Backend]:
    """A request without a seed gets a constant one, so that all its samples are equal."""
    return asking(backend, lambda request: dataclasses.replace(request, seed=request.seed or 42))


@spoiled_backend(caught_by="sampling/a_seed_fixes_the_output", says="3 of 4 outputs differ")
def seeds_by_place_in_the_batch(backend: type[Backend]) -> type[Backend]:
    """A seeded draw depends on the number of concurrent requests."""

    class Wrong(SoundBackend):
        """Shares one generator between the requests of a batch."""

        beside = 0

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if request.seed is not None:
                request = dataclasses.replace(request, seed=request.seed + self.beside)
            self.beside += 1
            try:
                return await super().generate(request)
            finally:
                self.beside -= 1

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="generate/at_most_max_new_tokens", says="assert len(completion.token_ids) <= count")
def generates_one_token_too_many(backend: type[Backend]) -> type[Backend]:
    """A completion may be one token longer than max_new_tokens."""
    return asking(backend, lambda request: dataclasses.replace(request, max_new_tokens=request.max_new_tokens + 1))


@spoiled_backend(caught_by="generate/greedy_takes_the_most_likely_token", says="nats below the most likely one")
def loses_the_first_prompt_token(backend: type[Backend]) -> type[Backend]:
    """The first prompt token is dropped, as a BOS that the engine would add by itself."""
    return asking(
        backend, lambda request: dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[1:] or [0])
    )


@spoiled_backend(caught_by="generate/greedy_takes_the_most_likely_token", says="nats below the most likely one")
def sees_the_end_of_long_prompts_only(backend: type[Backend]) -> type[Backend]:
    """The model sees only the last 64 tokens of a prompt."""
    return asking(
        backend, lambda request: dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[-64:])
    )
