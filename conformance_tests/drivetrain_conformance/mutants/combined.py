"""Fields that work alone, but are lost in combination with a pause, a stream or another field, or beyond a limit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.sampling import LogprobsMode
from drivetrain_conformance.mutants.registry import spoiled_backend
from drivetrain_conformance.mutants.spoil import SoundBackend, answering, asking, asking_for_params, mixed

# With a pause --------------------------------------------------------------------------------------------------------


def _resubmitting(
    backend: type[Backend],
    frozen: PauseMode,
    concerns: Callable[[GenerateRequest], bool],
    change: Callable[[GenerateRequest], GenerateRequest],
) -> type[Backend]:
    """Return a backend that ends requests instead of freezing them, and resubmits them later with their tokens."""

    class Wrong(SoundBackend):
        """Keeps only the tokens of a frozen request."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._flying: set[str] = set()
            self._ended: set[str] = set()
            self._thawed = asyncio.Event()

        async def freeze(self, mode: PauseMode) -> None:
            if mode is frozen:
                self._thawed.clear()
                self._ended |= self._flying
                await super().abort(list(self._flying))
            await super().freeze(mode)

        async def unfreeze(self) -> None:
            await super().unfreeze()
            self._thawed.set()

        async def stats(self) -> EngineStats:
            stats, count = await super().stats(), len(self._ended)
            if frozen is PauseMode.RETRACT:
                return dataclasses.replace(stats, waiting=stats.waiting + count)
            return dataclasses.replace(stats, running=stats.running + count)

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if not concerns(request):
                return await super().generate(request)
            self._flying.add(request.request_id)
            try:
                first = await super().generate(request)
            finally:
                self._flying.discard(request.request_id)
            if request.request_id not in self._ended or first.finish_reason is not FinishReason.ABORT:
                return first
            await self._thawed.wait()
            self._ended.discard(request.request_id)
            had = len(first.token_ids)
            again = dataclasses.replace(
                request,
                prompt_token_ids=request.prompt_token_ids + first.token_ids,
                max_new_tokens=request.max_new_tokens - had,
            )
            rest = await super().generate(change(again))
            ids = first.token_ids + rest.token_ids
            spans = [VersionSpan(span.version, 0, len(ids)) for span in rest.weight_versions[-1:]]
            return dataclasses.replace(rest, token_ids=ids, weight_versions=spans, logprobs=None, top_logprobs=None)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="pause/retract_freezes_requests_in_flight", says="nats below")
def restarts_the_seed_of_the_retracted(backend: type[Backend]) -> type[Backend]:
    """A retracted request restarts its random stream from the beginning."""
    return _resubmitting(backend, PauseMode.RETRACT, lambda request: request.seed is not None, lambda again: again)


@spoiled_backend(caught_by="pause/retract_freezes_requests_in_flight", says="nats below")
def forgets_what_the_retracted_counted(backend: type[Backend]) -> type[Backend]:
    """A frequency penalty counts only the tokens since the last retraction."""
    return _resubmitting(
        backend, PauseMode.RETRACT, lambda request: request.params.frequency_penalty != 0, lambda again: again
    )


@spoiled_backend(caught_by="pause/in_place_freezes_requests_in_flight", says="nats below")
def forgets_what_the_frozen_had_present(backend: type[Backend]) -> type[Backend]:
    """A presence penalty sees only the tokens since the last pause in place."""
    return _resubmitting(
        backend, PauseMode.IN_PLACE, lambda request: request.params.presence_penalty != 0, lambda again: again
    )


@spoiled_backend(caught_by="pause/in_place_freezes_requests_in_flight", says="nats below")
def counts_min_new_tokens_from_a_pause(backend: type[Backend]) -> type[Backend]:
    """A request frozen in place holds back stops for min_new_tokens further tokens."""
    return _resubmitting(
        backend, PauseMode.IN_PLACE, lambda request: request.params.min_new_tokens > 0, lambda again: again
    )


@spoiled_backend(caught_by="generate/higher_priority_starts_sooner", says="ran after others of lower priority")
def retracts_without_the_priority(backend: type[Backend]) -> type[Backend]:
    """A retracted request loses its priority and waits behind requests that have one."""
    return _resubmitting(
        backend,
        PauseMode.RETRACT,
        lambda request: request.priority > 0,
        lambda again: dataclasses.replace(again, priority=0),
    )


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def retracts_without_the_adapter(backend: type[Backend]) -> type[Backend]:
    """A retracted request continues without its adapter."""
    return _resubmitting(
        backend,
        PauseMode.RETRACT,
        lambda request: request.lora is not None,
        lambda again: dataclasses.replace(again, lora=None),
    )


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def freezes_without_the_adapter(backend: type[Backend]) -> type[Backend]:
    """A request frozen in place continues without its adapter."""
    return _resubmitting(
        backend,
        PauseMode.IN_PLACE,
        lambda request: request.lora is not None,
        lambda again: dataclasses.replace(again, lora=None),
    )


@spoiled_backend(caught_by="histories/random_histories_keep_the_contract", says="logprobs of its prompt are")
def scores_prompts_by_the_first_weights(backend: type[Backend]) -> type[Backend]:
    """Prompt logprobs are cached, and stay the same after the weights changed."""

    class Wrong(SoundBackend):
        """Caches prompt logprobs by prompt."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._known: dict[tuple[int, ...], list[float | None] | None] = {}

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            result = await super().generate(request)
            if result.prompt_logprobs is None:
                return result
            first = self._known.setdefault(tuple(request.prompt_token_ids), result.prompt_logprobs)
            return dataclasses.replace(result, prompt_logprobs=first)

    return mixed(backend, Wrong)


# With a stream -------------------------------------------------------------------------------------------------------


def _streaming(backend: type[Backend], change: Callable[[GenerateRequest], GenerateRequest]) -> type[Backend]:
    class Wrong(SoundBackend):
        """Changes the requests of streams only."""

        def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            return super().stream(change(request))

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def streams_without_the_adapter(backend: type[Backend]) -> type[Backend]:
    """A stream ignores its adapter."""
    return _streaming(backend, lambda request: dataclasses.replace(request, lora=None))


@spoiled_backend(
    caught_by="generate/higher_priority_starts_sooner", says="assert ended == sorted(priorities, reverse=True)"
)
def streams_without_the_priority(backend: type[Backend]) -> type[Backend]:
    """The priority of a stream is not passed on."""
    return _streaming(backend, lambda request: dataclasses.replace(request, priority=0))


@spoiled_backend(caught_by="sampling/without_a_seed_nothing_repeats", says="two of these were drawn alike")
def seeds_streams_by_their_prompt(backend: type[Backend]) -> type[Backend]:
    """Streams of one prompt without a seed draw the same tokens."""
    return _streaming(backend, lambda request: dataclasses.replace(request, seed=request.seed or 1))


# With an adapter -----------------------------------------------------------------------------------------------------


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="a prompt logprob is")
def scores_prompts_by_the_base(backend: type[Backend]) -> type[Backend]:
    """Prompt logprobs are always the base model's, even with an adapter."""

    class Wrong(SoundBackend):
        """Computes prompt logprobs in a pass without the adapter."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            result = await super().generate(request)
            if request.lora is None or request.params.prompt_logprobs is None:
                return result
            base = await super().generate(
                dataclasses.replace(request, request_id=f"base-{request.request_id}", lora=None)
            )
            return dataclasses.replace(result, prompt_logprobs=base.prompt_logprobs)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="a prompt logprob is")
def scores_alone_by_the_base(backend: type[Backend]) -> type[Backend]:
    """With max_new_tokens=0 prompt logprobs are the base model's, even with an adapter."""
    return asking(
        backend, lambda request: request if request.max_new_tokens else dataclasses.replace(request, lora=None)
    )


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="with an adapter, token")
def drops_masks_beside_an_adapter(backend: type[Backend]) -> type[Backend]:
    """Logit processors have no effect in a request that names an adapter."""
    return asking_for_params(backend, lambda request: {"logit_processors": ()} if request.lora else {})


@spoiled_backend(caught_by="lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="nats below")
def loses_adapters_asleep(backend: type[Backend]) -> type[Backend]:
    """After a sleep requests with an adapter are answered by the base model."""

    class Wrong(SoundBackend):
        """Loses adapters with the memory that sleep frees."""

        slept = False

        async def sleep(self, tags: frozenset[MemoryTag]) -> None:
            self.slept = True
            await super().sleep(tags)

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return await super().generate(dataclasses.replace(request, lora=None if self.slept else request.lora))

    return mixed(backend, Wrong)


# Beyond a limit ------------------------------------------------------------------------------------------------------


@spoiled_backend(caught_by="sampling/another_seed_draws_otherwise", says="alike")
def takes_seeds_modulo_32_bits(backend: type[Backend]) -> type[Backend]:
    """Only the lower 32 bits of a seed are passed on."""
    return asking(
        backend,
        lambda request: dataclasses.replace(request, seed=None if request.seed is None else request.seed % 2**32),
    )


@spoiled_backend(caught_by="sampling/another_seed_draws_otherwise", says="alike")
def takes_seeds_as_floats(backend: type[Backend]) -> type[Backend]:
    """A seed passes through a float64, which keeps 53 bits of it."""
    return asking(
        backend,
        lambda request: dataclasses.replace(
            request, seed=None if request.seed is None else min(int(float(request.seed)), 2**63 - 1)
        ),
    )


@spoiled_backend(caught_by="sampling/greedy_follows_the_logit_bias", says="below the best after penalties and bias")
def passes_on_a_few_biases(backend: type[Backend]) -> type[Backend]:
    """Only the first 32 tokens of a logit_bias are passed on."""
    return asking_for_params(backend, lambda request: {"logit_bias": dict([*request.params.logit_bias.items()][:32])})


@spoiled_backend(
    caught_by="errors/more_alternatives_than_tokens_are_refused", says="logprobs=200 alternatives were asked for"
)
def caps_alternatives(backend: type[Backend]) -> type[Backend]:
    """At most 20 alternatives of a token are returned."""
    return asking_for_params(
        backend, lambda request: {"logprobs": request.params.logprobs and min(request.params.logprobs, 20)}
    )


@spoiled_backend(caught_by="sampling/top_k_keeps_the_k_most_likely", says="with top_k=200 no token beyond the")
def caps_top_k(backend: type[Backend]) -> type[Backend]:
    """top_k keeps at most 64 tokens."""
    return asking_for_params(backend, lambda request: {"top_k": request.params.top_k and min(request.params.top_k, 64)})


@spoiled_backend(caught_by="sampling/a_high_temperature_flattens", says="the draws do not follow")
def caps_the_temperature(backend: type[Backend]) -> type[Backend]:
    """A temperature above 2 is reduced to 2."""
    return asking_for_params(backend, lambda request: {"temperature": min(request.params.temperature, 2.0)})


# With another field, or a file ---------------------------------------------------------------------------------------


@spoiled_backend(caught_by="stop/stop_token_ids_hold_where_eos_is_ignored", says="EOS ended it beside another")
def heeds_eos_beside_named_stops(backend: type[Backend]) -> type[Backend]:
    """In a request with stop token ids EOS ends generation despite ignore_eos."""

    class Wrong(SoundBackend):
        """Adds the model's EOS ids to the request's stops."""

        eos: tuple[int, ...] = ()

        async def start(self, report: Callable[[str], None]) -> ModelInfo:
            info = await super().start(report)
            self.eos = info.eos_token_ids
            return info

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            ends = request.stop_token_ids and tuple({*request.stop_token_ids, *self.eos})
            return await super().generate(dataclasses.replace(request, stop_token_ids=ends))

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="generate/every_file_that_names_an_end_is_heeded", says="the generation config's sampling is used"
)
def takes_the_generation_configs_temperature(backend: type[Backend]) -> type[Backend]:
    """A request with the default temperature is sampled at that of generation_config.json."""

    class Wrong(SoundBackend):
        """Fills in defaults from the model folder."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            file = Path(config.model) / "generation_config.json"
            self._default = float(json.loads(file.read_text()).get("temperature", 1.0)) if file.is_file() else 1.0

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if request.params.temperature != 1:
                return await super().generate(request)
            params = request.params.model_copy(update={"temperature": self._default})
            return await super().generate(dataclasses.replace(request, params=params))

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="stop/a_stop_token_id_ends_generation", says="expected Ending(")
def passes_on_a_few_stop_ids(backend: type[Backend]) -> type[Backend]:
    """Only the first 64 stop token ids end a completion."""
    return asking(backend, lambda request: dataclasses.replace(request, stop_token_ids=request.stop_token_ids[:64]))


@spoiled_backend(
    caught_by="sampling/greedy_follows_the_frequency_penalty", says="below the best after penalties and bias"
)
def forgets_what_was_drawn_long_ago(backend: type[Backend]) -> type[Backend]:
    """A frequency penalty ignores tokens more than 64 positions back."""

    class Wrong(SoundBackend):
        """Restarts the count every 64 tokens."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if not request.params.frequency_penalty or request.max_new_tokens <= 64:
                return await super().generate(request)
            first = await super().generate(dataclasses.replace(request, max_new_tokens=64))
            if first.finish_reason is not FinishReason.LENGTH:
                return first
            rest = await self.generate(
                dataclasses.replace(
                    request,
                    prompt_token_ids=request.prompt_token_ids + first.token_ids,
                    max_new_tokens=request.max_new_tokens - 64,
                )
            )
            ids = first.token_ids + rest.token_ids
            spans = [VersionSpan(span.version, 0, len(ids)) for span in rest.weight_versions]
            return dataclasses.replace(rest, token_ids=ids, weight_versions=spans)

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0.8 is"
)
def holds_back_before_it_counts(backend: type[Backend]) -> type[Backend]:
    """Before min_new_tokens, logprobs in mode temperature are those of the distribution without EOS."""

    def change(request: GenerateRequest) -> GenerateRequest:
        masks = request.params.min_new_tokens and request.logprobs_mode is LogprobsMode.TEMPERATURE
        return dataclasses.replace(request, logprobs_mode=LogprobsMode.PROCESSED) if masks else request

    return asking(backend, change)


# Version boundaries --------------------------------------------------------------------------------------------------


def _labelled_early(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    if len(result.weight_versions) != 2:
        return result
    before, after = result.weight_versions
    spans = [VersionSpan(before.version, 0, before.end - 1), VersionSpan(after.version, after.start - 1, after.end)]
    return dataclasses.replace(result, weight_versions=spans)


@spoiled_backend(caught_by="weight_sync/frozen_requests_go_on_where_they_were", says="which took over with token")
def labels_the_last_old_token_as_new(backend: type[Backend]) -> type[Backend]:
    """The last token of the old weights carries the new version."""
    return answering(backend, _labelled_early)


@spoiled_backend(
    caught_by="weight_sync/a_new_label_divides_what_is_in_flight", says="tokens were made before the new label, and"
)
def labels_a_token_before_its_time(backend: type[Backend]) -> type[Backend]:
    """The last token before a new label already carries it."""
    return answering(backend, _labelled_early)


@spoiled_backend(caught_by="weight_sync/frozen_requests_go_on_where_they_were", says="on the cache that the old ones")
def retracts_what_it_freezes_in_place(backend: type[Backend]) -> type[Backend]:
    """A request frozen in place loses its cache, which the new weights recompute."""

    class Wrong(SoundBackend):
        """Freezes in place by retracting."""

        async def freeze(self, mode: PauseMode) -> None:
            await super().freeze(PauseMode.RETRACT if mode is PauseMode.IN_PLACE else mode)

    return mixed(backend, Wrong)
