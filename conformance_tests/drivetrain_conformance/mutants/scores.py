"""Scores of other positions, ids or distributions, or of fewer positions than were asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.outputs import GenerationOutput, VersionSpan
from drivetrain.types.token_scores import Scoring, TokenScores
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, own, request_mutant, result_mutant


@mutant("scoring/scores_are_of_the_temperature", says="at temperature 0.5 is")
class scores_without_the_temperature(CorrectBackend):
    """Scores are those of the model's own distribution, labelled with the temperature."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.scoring is None:
            return await super().generate(request)
        raw = dataclasses.replace(request.scoring, temperature=1.0)
        result = await super().generate(dataclasses.replace(request, scoring=raw))
        assert result.scores is not None
        scores = dataclasses.replace(result.scores, temperature=request.scoring.temperature)
        return dataclasses.replace(result, scores=scores)


@result_mutant("scoring/given_ids_are_scored_at_each_position", says="the logprob of its own token")
def shifts_scores_by_a_position(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Each position has the logprobs of the position before."""
    scores = result.scores
    if scores is None or scores.positions < 3:
        return result
    rows = [1, *range(1, scores.positions - 1)]
    return dataclasses.replace(
        result,
        scores=dataclasses.replace(
            scores,
            packed_tokens=scores.token_logprobs[[0, *rows]].tobytes(),
            packed_at=scores.at_logprobs[[0, *rows]].tobytes(),
        ),
    )


@result_mutant("scoring/given_ids_are_scored_at_each_position", says="the logprob of a given id")
def scores_the_same_ids_everywhere(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Every position has the given ids' logprobs of the last one."""
    scores = result.scores
    if scores is None or not scores.width:
        return result
    at = scores.at_logprobs.copy()
    at[1:] = at[-1]
    return dataclasses.replace(result, scores=dataclasses.replace(scores, packed_at=at.tobytes()))


@request_mutant("scoring/given_ids_are_scored_at_each_position", says="the logprob of a given id")
def scores_ids_in_another_order(request: GenerateRequest) -> GenerateRequest:
    """Given ids are scored in ascending order instead of their own."""
    if request.scoring is None or not request.scoring.width:
        return request
    ordered = np.sort(request.scoring.ids(), axis=1).tobytes()
    return dataclasses.replace(request, scoring=dataclasses.replace(request.scoring, packed_ids=ordered))


@request_mutant("scoring/scores_name_the_likeliest_tokens", says="other scores")
def names_one_likely_token_less(request: GenerateRequest) -> GenerateRequest:
    """One likely token less than asked for is returned at each position."""
    if request.scoring is None or not request.scoring.top_k:
        return request
    fewer = dataclasses.replace(request.scoring, top_k=request.scoring.top_k - 1)
    return dataclasses.replace(request, scoring=fewer)


@request_mutant("scoring/tokens_come_with_scores", says="0 tokens came beside scores, not 6")
def generates_nothing_beside_scores(request: GenerateRequest) -> GenerateRequest:
    """A request that asks for scores samples no token."""
    return request if request.scoring is None else dataclasses.replace(request, max_new_tokens=0)


@request_mutant("scoring/tokens_come_with_scores", says="no prompt_logprobs came beside scores")
def scores_in_the_place_of_prompt_logprobs(request: GenerateRequest) -> GenerateRequest:
    """A request that asks for scores gets no prompt_logprobs."""
    if request.scoring is None or request.params.prompt_logprobs is None:
        return request
    params = request.params.model_copy(update={"prompt_logprobs": None, "return_prompt_ranks": False})
    return dataclasses.replace(request, params=params)


@result_mutant("scoring/tokens_come_with_scores", says="prompt token 1 has rank")
def ranks_from_zero_beside_scores(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The most likely prompt token has rank 0 in a request that asks for scores too."""
    if request.scoring is None or result.prompt_ranks is None:
        return result
    ranks = [None if rank is None else rank - 1 for rank in result.prompt_ranks]
    return dataclasses.replace(result, prompt_ranks=ranks)


@result_mutant("scoring/tokens_come_with_scores", says="prompt token 1 beside scores: the tokens named")
def names_likely_prompt_tokens_by_other_ids_beside_scores(
    request: GenerateRequest, result: GenerateResult
) -> GenerateResult:
    """The likely tokens of a prompt's position have each the next one's id in a request that asks for scores too."""
    if request.scoring is None or not result.prompt_top_logprobs:
        return result
    turned = [
        top and [(top[(at + 1) % len(top)][0], logprob) for at, (_, logprob) in enumerate(top)]
        for top in result.prompt_top_logprobs
    ]
    return dataclasses.replace(result, prompt_top_logprobs=turned)


@request_mutant("scoring/only_the_last_positions_are_scored", says="the logprob of its own token")
def scores_the_first_positions(request: GenerateRequest) -> GenerateRequest:
    """The first positions are scored in place of the last ones."""
    if request.scoring is None:
        return request
    return dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[: request.scoring.positions + 1])


@mutant("scoring/cached_prefixes_lose_no_position", says="other scores")
class loses_the_positions_of_cached_prefixes(CorrectBackend):
    """Positions whose tokens are in the prefix cache have no scores."""

    _seen: set[tuple[int, ...]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result, prefix = await super().generate(request), tuple(request.prompt_token_ids[:16])
        scores, known = result.scores, prefix in self._seen
        self._seen.add(prefix)
        if scores is None or not known or scores.positions <= 16:
            return result
        left = Scoring(scores.positions - 16, scores.temperature)
        return dataclasses.replace(result, scores=TokenScores.pack(left, scores.token_logprobs[16:]))


@mutant("scoring/scores_are_of_the_weights_that_are_served", says="the logprob of its own token")
class remembers_scores(CorrectBackend):
    """The logprobs of a sequence's own tokens are computed once, and given again after a weight update."""

    _known: dict[tuple[object, ...], bytes] = own(dict)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result, scoring = await super().generate(request), request.scoring
        if scoring is None or result.scores is None:
            return result
        key = (request.lora, scoring.positions, scoring.temperature, *request.prompt_token_ids)
        tokens = self._known.setdefault(key, result.scores.packed_tokens)
        return dataclasses.replace(result, scores=dataclasses.replace(result.scores, packed_tokens=tokens))


@request_mutant("scoring/scores_are_of_the_adapter", says="the logprob of its own token")
def scores_without_the_adapter(request: GenerateRequest) -> GenerateRequest:
    """Scores are the base model's; the named adapter is ignored."""
    return request if request.scoring is None else dataclasses.replace(request, lora=None)


@mutant("scoring/sequences_of_many_chunks_are_scored_whole", says="the logprob of its own token")
class forgets_earlier_chunks(CorrectBackend):
    """The last position of a sequence of several chunks is scored as if the sequence began with its last chunk."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result, prompt, chunk = (
            await super().generate(request),
            request.prompt_token_ids,
            self.config.max_num_batched_tokens,
        )
        if result.scores is None or chunk is None or len(prompt) <= chunk + 1:
            return result
        late = dataclasses.replace(
            request, request_id=f"{request.request_id}-late", prompt_token_ids=prompt[chunk:], scoring=Scoring(1)
        )
        other = (await super().generate(late)).scores
        assert other is not None
        tokens = result.scores.packed_tokens[:-4] + other.packed_tokens
        return dataclasses.replace(result, scores=dataclasses.replace(result.scores, packed_tokens=tokens))


@mutant("scoring/scores_are_of_the_adapter", says="the logprob of its own token")
class scores_without_an_adapter_of_the_head(CorrectBackend):
    """Scores are those of the base model if the adapter changes the model's head."""

    _of_the_head: set[str] = own(set)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        if "lm_head" in json.loads((Path(lora_path) / "adapter_config.json").read_text())["target_modules"]:
            self._of_the_head.add(lora_name)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.scoring is not None and request.lora in self._of_the_head:
            request = dataclasses.replace(request, lora=None)
        return await super().generate(request)


def _labelled(output: GenerationOutput, *spans: VersionSpan) -> GenerationOutput:
    return GenerationOutput([dataclasses.replace(one, weight_versions=spans) for one in output.completions])


@mutant("scoring/scores_are_of_the_weights_that_are_served", says="the logprob of its own token by")
class names_the_version_at_the_end_of_the_call(InferenceEngine):
    """All sequences of a call name the version that is served when it ends, not the one that scored them."""

    async def compute_logprobs(self, sequences: Any, **arguments: Any) -> GenerationOutput:
        output = await super().compute_logprobs(sequences, **arguments)
        return _labelled(output, VersionSpan(self.get_weight_version(), 0, 0))


@mutant("scoring/scores_are_of_the_weights_that_are_served", says="its weight version is None")
class names_no_version_of_scores(InferenceEngine):
    """Scores do not say which weights they are of."""

    async def compute_logprobs(self, sequences: Any, **arguments: Any) -> GenerationOutput:
        return _labelled(await super().compute_logprobs(sequences, **arguments))


@mutant("scoring/scores_are_of_the_weights_that_are_served", says="the logprob of its own token by")
class names_the_version_at_the_beginning_of_the_call(InferenceEngine):
    """All sequences of a call name the version that was served when it began, not the one that scored them."""

    async def compute_logprobs(self, sequences: Any, **arguments: Any) -> GenerationOutput:
        version = self.get_weight_version()
        return _labelled(await super().compute_logprobs(sequences, **arguments), VersionSpan(version, 0, 0))
