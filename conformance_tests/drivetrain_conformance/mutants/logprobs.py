"""Plausible but wrong logprobs: of another distribution, another token or another position."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, ModelInfo
from drivetrain.errors import InvalidRequest
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import TopLogprobs
from drivetrain.types.sampling import LogprobsMode
from drivetrain_conformance.mutants.registry import spoiled_backend
from drivetrain_conformance.mutants.spoil import SoundBackend, answering, asking, mixed

_ChangeTop = Callable[[int, float, TopLogprobs], TopLogprobs]
"""Returns a wrong list of top logprobs, given a token, its logprob and the right list."""


def _relabelled(backend: type[Backend], asked: LogprobsMode, given: LogprobsMode) -> type[Backend]:
    def change(request: GenerateRequest) -> GenerateRequest:
        mode = given if request.logprobs_mode is asked else request.logprobs_mode
        return dataclasses.replace(request, logprobs_mode=mode)

    return asking(backend, change)


@spoiled_backend(
    caught_by="logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0.5 is"
)
def labels_raw_logprobs_as_temperature(backend: type[Backend]) -> type[Backend]:
    """In mode temperature the model's own logprobs are returned."""
    return _relabelled(backend, LogprobsMode.TEMPERATURE, LogprobsMode.RAW)


@spoiled_backend(
    caught_by="logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0 is 0.00000"
)
def labels_processed_logprobs_as_temperature(backend: type[Backend]) -> type[Backend]:
    """In mode temperature the logprobs of the truncated distribution are returned."""
    return _relabelled(backend, LogprobsMode.TEMPERATURE, LogprobsMode.PROCESSED)


@spoiled_backend(
    caught_by="logprob/processed_is_the_distribution_drawn_from", says="in mode processed at temperature 0 is"
)
def labels_temperature_logprobs_as_processed(backend: type[Backend]) -> type[Backend]:
    """In mode processed the logprobs before truncation are returned."""
    return _relabelled(backend, LogprobsMode.PROCESSED, LogprobsMode.TEMPERATURE)


@spoiled_backend(caught_by="logprob/raw_is_the_models_own_distribution", says="the reference says")
def shifts_logprobs(backend: type[Backend]) -> type[Backend]:
    """Each logprob belongs to the previous token."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        logprobs = result.logprobs
        return dataclasses.replace(result, logprobs=logprobs and [0.0, *logprobs[:-1]])

    return answering(backend, change)


@spoiled_backend(caught_by="logprob/raw_is_the_models_own_distribution", says="so they were rounded")
def rounds_logprobs(backend: type[Backend]) -> type[Backend]:
    """Logprobs are rounded to bfloat16, with eight bits of precision."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        return dataclasses.replace(result, logprobs=result.logprobs and [_bfloat16(x) for x in result.logprobs])

    return answering(backend, change)


def _bfloat16(value: float) -> float:
    bits = int.from_bytes(struct.pack(">f", value), "big") & 0xFFFF0000
    rounded: float = struct.unpack(">f", bits.to_bytes(4, "big"))[0]
    return rounded


@spoiled_backend(caught_by="logprob/raw_is_the_models_own_distribution", says="in mode raw at temperature 0.5 is")
def gives_the_best_tokens_logprob(backend: type[Backend]) -> type[Backend]:
    """The logprob is that of the most likely token, whichever was sampled."""

    class Wrong(SoundBackend):
        """Takes the first of the top logprobs."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            wanted = request.params.logprobs
            if wanted is None:
                return await super().generate(request)
            listing = dataclasses.replace(request, params=request.params.model_copy(update={"logprobs": wanted or 1}))
            result = await super().generate(listing)
            first = [top[0][1] for top in result.top_logprobs or []]
            return dataclasses.replace(result, logprobs=first, top_logprobs=result.top_logprobs if wanted else None)

    return mixed(backend, Wrong)


def _with_top(backend: type[Backend], change: _ChangeTop) -> type[Backend]:
    def changed(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if not result.top_logprobs:
            return result
        rows = zip(result.token_ids, result.logprobs or [], result.top_logprobs, strict=True)
        return dataclasses.replace(result, top_logprobs=[change(token, logprob, top) for token, logprob, top in rows])

    return answering(backend, changed)


@spoiled_backend(caught_by="logprob/top_logprobs_raw", says="not in order")
def gives_top_logprobs_unsorted(backend: type[Backend]) -> type[Backend]:
    """The most likely tokens are sorted by id."""
    return _with_top(backend, lambda token, logprob, top: sorted(top))


@spoiled_backend(caught_by="logprob/top_logprobs_raw", says="expected 4 tokens, got 3")
def gives_one_top_logprob_too_few(backend: type[Backend]) -> type[Backend]:
    """Only k - 1 of the k most likely tokens are returned."""
    return _with_top(backend, lambda token, logprob, top: top[:-1])


@spoiled_backend(caught_by="logprob/top_logprobs_raw", says="expected logprobs")
def puts_the_sampled_token_among_the_top(backend: type[Backend]) -> type[Backend]:
    """The sampled token heads the list of the most likely ones, even if it is not one of them."""

    def change(token: int, logprob: float, top: TopLogprobs) -> TopLogprobs:
        return [(token, logprob), *(pair for pair in top if pair[0] != token)][: len(top)]

    return _with_top(backend, change)


@spoiled_backend(caught_by="logprob/prompt_logprobs_are_raw", says="the logprob of prompt token 1 is")
def shifts_prompt_logprobs(backend: type[Backend]) -> type[Backend]:
    """Each prompt logprob belongs to the next token."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        logprobs = result.prompt_logprobs
        if logprobs is None or len(logprobs) < 2:
            return result
        return dataclasses.replace(result, prompt_logprobs=[None, *logprobs[2:], logprobs[1]])

    return answering(backend, change)


@spoiled_backend(caught_by="logprob/a_cached_prefix_changes_no_prompt_logprob", says="prompt token 1 has no logprob")
def loses_cached_prompt_logprobs(backend: type[Backend]) -> type[Backend]:
    """Prompt tokens found in the cache have no logprobs."""

    class Wrong(SoundBackend):
        """Remembers prompts, as a prefix cache does."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._seen: set[tuple[int, ...]] = set()

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            prompt = tuple(request.prompt_token_ids)
            seen = prompt in self._seen
            self._seen.add(prompt)
            result = await super().generate(request)
            if seen and result.prompt_logprobs is not None:
                return dataclasses.replace(result, prompt_logprobs=[None] * len(prompt))
            return result

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="logprob/given_tokens_are_scored_and_none_is_sampled", says="assert completion.token_ids == []"
)
def samples_when_it_scores(backend: type[Backend]) -> type[Backend]:
    """A request to score tokens, without sampling, samples one."""
    return asking(backend, lambda request: dataclasses.replace(request, max_new_tokens=max(1, request.max_new_tokens)))


@spoiled_backend(caught_by="logprob/given_tokens_are_scored_and_none_is_sampled", says="no room for a token")
def wants_room_to_score(backend: type[Backend]) -> type[Backend]:
    """A sequence that fills the context cannot be scored, as scoring generates a token after it."""

    class Wrong(SoundBackend):
        """Scores by generating one token."""

        async def start(self, report: Callable[[str], None]) -> ModelInfo:
            self._info = await super().start(report)
            return self._info

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if len(request.prompt_token_ids) == self._info.context_length:
                raise InvalidRequest("no room for a token after the prompt", field="prompts")
            return await super().generate(request)

    return mixed(backend, Wrong)
