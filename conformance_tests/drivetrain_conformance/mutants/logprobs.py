"""Plausible but wrong logprobs: of another distribution, another token or another position."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, ModelInfo
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain.types.outputs import TopLogprobs
from drivetrain.types.sampling import LogprobsMode
from drivetrain_conformance.mutants.registry import backend_mutants, mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, answering, own, request_mutant, result_mutant

_ChangeTop = Callable[[int, float, TopLogprobs], TopLogprobs]
"""Returns a wrong list of top logprobs, given a token, its logprob and the right list."""


def _relabelled(request: GenerateRequest, asked: LogprobsMode, given: LogprobsMode) -> GenerateRequest:
    return dataclasses.replace(request, logprobs_mode=given) if request.logprobs_mode is asked else request


@request_mutant("logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0.5 is")
def labels_raw_logprobs_as_temperature(request: GenerateRequest) -> GenerateRequest:
    """In mode temperature the model's own logprobs are returned."""
    return _relabelled(request, LogprobsMode.TEMPERATURE, LogprobsMode.RAW)


@request_mutant(
    "logprob/temperature_is_what_a_trainer_recomputes", says="in mode temperature at temperature 0 is 0.00000"
)
def labels_processed_logprobs_as_temperature(request: GenerateRequest) -> GenerateRequest:
    """In mode temperature the logprobs of the truncated distribution are returned."""
    return _relabelled(request, LogprobsMode.TEMPERATURE, LogprobsMode.PROCESSED)


@request_mutant("logprob/processed_is_the_distribution_drawn_from", says="in mode processed at temperature 0 is")
def labels_temperature_logprobs_as_processed(request: GenerateRequest) -> GenerateRequest:
    """In mode processed the logprobs before truncation are returned."""
    return _relabelled(request, LogprobsMode.PROCESSED, LogprobsMode.TEMPERATURE)


@result_mutant("logprob/raw_is_the_models_own_distribution", says="the reference says")
def shifts_logprobs(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Each logprob belongs to the previous token."""
    logprobs = result.logprobs
    return dataclasses.replace(result, logprobs=logprobs and [0.0, *logprobs[:-1]])


@result_mutant("logprob/raw_is_the_models_own_distribution", says="so they were rounded")
def rounds_logprobs(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Logprobs are rounded to bfloat16, with eight bits of precision."""
    return dataclasses.replace(result, logprobs=result.logprobs and [_bfloat16(x) for x in result.logprobs])


@mutant("sleep/any_order_of_tags", says="nats off")
class rounds_logprobs_once_it_slept(CorrectBackend):
    """After a wake-up, logits are computed in bfloat16."""

    _has_slept = False

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await super().wake_up(tags)
        self._has_slept = True

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        return rounds_logprobs(request, result) if self._has_slept else result


@result_mutant("parallel/layers_split_over_two_ranks", says="the logprob of token", needs=Capability.TENSOR_PARALLEL)
def normalises_over_one_ranks_vocabulary(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Logprobs are of one rank's half of the vocabulary."""
    logprobs = result.logprobs
    return dataclasses.replace(result, logprobs=logprobs and [min(x + math.log(2), 0.0) for x in logprobs])


def _bfloat16(value: float) -> float:
    bits = int.from_bytes(struct.pack(">f", value), "big") & 0xFFFF0000
    rounded: float = struct.unpack(">f", bits.to_bytes(4, "big"))[0]
    return rounded


@mutant("logprob/raw_is_the_models_own_distribution", says="in mode raw at temperature 0.5 is")
class gives_the_best_tokens_logprob(CorrectBackend):
    """The logprob is the most likely token's, also if another was sampled."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        wanted = request.params.logprobs
        if wanted is None:
            return await super().generate(request)
        listing = dataclasses.replace(request, params=request.params.model_copy(update={"logprobs": wanted or 1}))
        result = await super().generate(listing)
        first = [top[0][1] for top in result.top_logprobs or []]
        return dataclasses.replace(result, logprobs=first, top_logprobs=result.top_logprobs if wanted else None)


def _with_top(backend: type[Backend], change: _ChangeTop) -> type[Backend]:
    def changed(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if not result.top_logprobs:
            return result
        rows = zip(result.token_ids, result.logprobs or [], result.top_logprobs, strict=True)
        return dataclasses.replace(result, top_logprobs=[change(token, logprob, top) for token, logprob, top in rows])

    return answering(backend, changed)


top_logprobs_mutant = backend_mutants(_with_top)


@top_logprobs_mutant("logprob/top_logprobs_raw", says="not in order")
def gives_top_logprobs_unsorted(token: int, logprob: float, top: TopLogprobs) -> TopLogprobs:
    """The most likely tokens are sorted by id."""
    return sorted(top)


@top_logprobs_mutant("logprob/top_logprobs_raw", says="expected 4 tokens, got 3")
def gives_one_top_logprob_too_few(token: int, logprob: float, top: TopLogprobs) -> TopLogprobs:
    """Only k - 1 of the k most likely tokens are returned."""
    return top[:-1]


@top_logprobs_mutant("logprob/top_logprobs_raw", says="expected logprobs")
def puts_the_sampled_token_among_the_top(token: int, logprob: float, top: TopLogprobs) -> TopLogprobs:
    """The sampled token heads the list of the most likely ones, even if it is not one of them."""
    return [(token, logprob), *(pair for pair in top if pair[0] != token)][: len(top)]


@result_mutant("logprob/prompt_logprobs_are_raw", says="the logprob of prompt token 1 is")
def shifts_prompt_logprobs(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Each prompt logprob belongs to the next token."""
    logprobs = result.prompt_logprobs
    if logprobs is None or len(logprobs) < 2:
        return result
    return dataclasses.replace(result, prompt_logprobs=[None, *logprobs[2:], logprobs[1]])


@result_mutant("logprob/prompt_ranks_count_the_tokens_that_are_as_likely", says="prompt token 1 has rank")
def counts_ranks_from_zero(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The most likely token has rank 0."""
    ranks = [None if rank is None else rank - 1 for rank in result.prompt_ranks or ()]
    return dataclasses.replace(result, prompt_ranks=ranks or None)


@result_mutant("logprob/prompt_ranks_count_the_tokens_that_are_as_likely", says="prompt token 1 has rank")
def ranks_within_the_prompt(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Ranks count the prompt's own tokens, not the vocabulary's."""
    ranks = [rank for rank in result.prompt_ranks or () if rank is not None]
    if not ranks:
        return result
    return dataclasses.replace(result, prompt_ranks=[None, *(1 + sorted(ranks).index(rank) for rank in ranks)])


@result_mutant("logprob/prompt_ranks_count_the_tokens_that_are_as_likely", says="plain.prompt_ranks is None")
def gives_ranks_unasked(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Ranks come with every prompt's logprobs."""
    if result.prompt_logprobs is None or result.prompt_ranks is not None:
        return result
    return dataclasses.replace(result, prompt_ranks=[None] + [1] * (len(request.prompt_token_ids) - 1))


@mutant("logprob/a_cached_prefix_changes_no_prompt_logprob", says="prompt token 1 has no logprob")
class loses_cached_prompt_logprobs(CorrectBackend):
    """Prompt tokens found in the cache have no logprobs."""

    _seen: set[tuple[int, ...]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        prompt = tuple(request.prompt_token_ids)
        seen = prompt in self._seen
        self._seen.add(prompt)
        result = await super().generate(request)
        if seen and result.prompt_logprobs is not None:
            return dataclasses.replace(result, prompt_logprobs=[None] * len(prompt))
        return result


@request_mutant("logprob/given_tokens_are_scored_and_none_is_sampled", says="assert completion.token_ids == []")
def samples_when_it_scores(request: GenerateRequest) -> GenerateRequest:
    """A request to score tokens, without sampling, samples one."""
    return dataclasses.replace(request, max_new_tokens=max(1, request.max_new_tokens))


@mutant("logprob/given_tokens_are_scored_and_none_is_sampled", says="no room for a token")
class wants_room_to_score(CorrectBackend):
    """A sequence that fills the context cannot be scored, as scoring generates a token after it."""

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        self._info = await super().start(report)
        return self._info

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if len(request.prompt_token_ids) == self._info.context_length:
            raise InvalidRequest("no room for a token after the prompt", field="prompts")
        return await super().generate(request)
