"""Wrong answers: tokens, ends, text and order."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.engine.controller import Controller
from drivetrain.engine.generation import Generation
from drivetrain.engine.samples import Sample
from drivetrain.engine.sessions import Session, Sessions, Turn
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import Completion, FinishReason, VersionSpan
from drivetrain.types.prompts import TextPrompt
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    completions_mutant,
    cut,
    deltas_mutant,
    own,
    result_mutant,
)


@result_mutant("generate/at_most_max_new_tokens", says="assert len(completion.token_ids) <= count")
def returns_the_prompt_too(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The ids begin with those of the prompt, as transformers' own generate returns them."""
    prompt = request.prompt_token_ids
    spans = [VersionSpan(span.version, 0, span.end + len(prompt)) for span in result.weight_versions[-1:]]
    logprobs = result.logprobs and [0.0] * len(prompt) + result.logprobs
    return dataclasses.replace(result, token_ids=prompt + result.token_ids, weight_versions=spans, logprobs=logprobs)


@result_mutant("generate/greedy_takes_the_most_likely_token", says="outside the vocabulary of")
def answers_with_ids_that_the_model_has_not(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The last id of an answer is one of the padding that fills up the vocabulary."""
    return dataclasses.replace(result, token_ids=[*result.token_ids[:-1], 10**6])


@deltas_mutant("streaming/the_chunks_are_the_completion", says="outside the vocabulary of")
async def streams_negative_ids(deltas: AsyncGenerator[TokenDelta, None]) -> AsyncGenerator[TokenDelta, None]:
    """Tokens of a stream that were not drawn yet come as -1, as engines fill up a row."""
    async for delta in deltas:
        yield dataclasses.replace(delta, token_ids=[*delta.token_ids, -1] if delta.result is None else delta.token_ids)


@completions_mutant("generate/greedy_takes_the_most_likely_token", says="outside the vocabulary of")
def counts_ids_from_the_vocabularys_end(completions: list[Completion]) -> list[Completion]:
    """The last id of an answer is negative, and names the same token if ids are counted from the vocabulary's end."""
    return [dataclasses.replace(one, token_ids=[*one.token_ids[:-1], one.token_ids[-1] - 260]) for one in completions]


@result_mutant("generate/eos_ends_a_completion", says="the EOS that ended it stays in the ids")
def loses_the_stop_token(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The stop token, EOS included, was sampled and is not among the ids, nor its logprob among theirs."""
    if result.matched_stop is None:
        return result
    return dataclasses.replace(cut(result, len(result.token_ids) - 1), matched_stop=None)


@result_mutant("generate/eos_ends_a_completion", says="assert not ids or ids[-1] not in eos")
def says_length_for_stop(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """A sample that ended at a stop token is said to have reached its length."""
    if result.finish_reason is not FinishReason.STOP:
        return result
    return dataclasses.replace(result, finish_reason=FinishReason.LENGTH, matched_stop=None)


class _Reading(CorrectBackend):
    """A backend that has the tokenizer."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.tokenizer = Tokenizer.load(config)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode."""
        return self.tokenizer(token_ids, skip_special_tokens=False)


@mutant("generate/greedy_takes_the_most_likely_token", says="nats below the most likely one")
class tokenises_its_own_text(_Reading):
    """Ids are made from the text that was generated, not those that were sampled; both decode to the same."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        prompt = TextPrompt(text=self.text(result.token_ids), add_special_tokens=False)
        ids = self.tokenizer.encode(prompt)
        spans = [VersionSpan(span.version, 0, len(ids)) for span in result.weight_versions[-1:] if ids]
        logprobs = result.logprobs and (result.logprobs + [0.0] * len(ids))[: len(ids)]
        return dataclasses.replace(result, token_ids=ids, weight_versions=spans, logprobs=logprobs)


@mutant("stop/what_merely_ends_like_a_match_is_no_match", says="finish_reason=<FinishReason.LENGTH")
class stops_at_the_end_of_a_stop_string(_Reading):
    """A token that ends like a stop string ends generation, also if the text before it does not match."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        lasts = tuple(stop[-1] for stop in request.params.stop)
        for count, token_id in enumerate(result.token_ids, 1):
            if lasts and self.text([token_id]).endswith(lasts):
                return dataclasses.replace(cut(result, count), finish_reason=FinishReason.STOP)
        return result


@completions_mutant("stop/a_stop_string_ends_generation_at_its_first_match", says="expected Ending(")
def keeps_the_matched_stop_text(completions: list[Completion]) -> list[Completion]:
    """The matched stop string stays in the text, though it was not asked for."""
    return [
        dataclasses.replace(c, text=c.text + c.matched_stop) if isinstance(c.matched_stop, str) else c
        for c in completions
    ]


@mutant("generate/the_text_is_the_decoding_of_the_ids", says="assert completion.text == (decode(ids")
class shows_the_stop_token(Generation):
    """The text holds the stop token's own."""

    async def complete(self, sample: Sample) -> Completion:
        completion = await super().complete(sample)
        if not isinstance(completion.matched_stop, int):
            return completion
        text = self.model.tokenizer(completion.token_ids, skip_special_tokens=False)
        return dataclasses.replace(completion, text=text)


@completions_mutant("generate/samples_are_grouped_by_prompt", says="assert [(c.prompt_index, c.sample_index)")
def returns_samples_in_the_wrong_order(completions: list[Completion]) -> list[Completion]:
    """Samples come sample by sample, not prompt by prompt."""
    return sorted(completions, key=lambda c: (c.sample_index, c.prompt_index))


@completions_mutant(
    "generate/each_prompt_can_have_params_of_its_own", says="completions are not in order of the prompts"
)
def returns_completions_as_they_end(completions: list[Completion]) -> list[Completion]:
    """The shortest completions come first."""
    return sorted(completions, key=lambda c: len(c.token_ids))


@mutant("generate/calls_at_once_do_not_mix", says="nats below the most likely one")
class hands_results_to_the_wrong_caller(CorrectBackend):
    """The first result goes to who asked last: requests that run together get each other's tokens."""

    _callers: deque[asyncio.Future[GenerateResult]] = own(deque)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        mine: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._callers.append(mine)
        try:
            result = await super().generate(request)
            self._callers.pop().set_result(result)
            return await mine
        finally:
            if mine in self._callers:
                self._callers.remove(mine)


@mutant("generate/at_most_max_new_tokens", says="hangs")
class never_ends_after_one_token(CorrectBackend):
    """A request for one token, which the prefill already answers, never ends."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.max_new_tokens == 1:
            await asyncio.get_running_loop().create_future()
        return result


@mutant("generate/cancelling_a_call_ends_its_requests", says="requests of a cancelled call are still there")
class goes_on_after_its_caller_left(CorrectBackend):
    """A cancelled call leaves its request running in the engine."""

    _left: set[asyncio.Task[GenerateResult]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        task = asyncio.create_task(super().generate(request))
        self._left.add(task)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)


@mutant("generate/a_batch_equals_each_prompt_alone", says="nats below the most likely one")
class counts_padding_as_tokens(CorrectBackend):
    """The ids that fill up a row to the length of the longest one beside it are seen by the model."""

    _lengths: list[int] = own(list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        length = len(request.prompt_token_ids)
        longest = max(length, *self._lengths) if self._lengths else length
        self._lengths.append(length)
        try:
            padded = [0] * (longest - length) + list(request.prompt_token_ids)
            return await super().generate(dataclasses.replace(request, prompt_token_ids=padded))
        finally:
            self._lengths.remove(length)


class _Misreading(CorrectBackend):
    """Base class of mutants that read something else from a model's config.json."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="misread-"))
        for file in Path(config.model).iterdir():
            (self._folder / file.name).symlink_to(file)
        given = json.loads((self._folder / "config.json").read_text())
        self.misread(given)
        (self._folder / "config.json").unlink()
        (self._folder / "config.json").write_text(json.dumps(given))
        super().__init__(config.model_copy(update={"model": str(self._folder)}))

    def misread(self, given: dict[str, Any]) -> None:
        """Change the fields of config.json."""

    async def close(self) -> None:
        await super().close()
        shutil.rmtree(self._folder)


@mutant("generate/frequencies_that_depend_on_length_are_right_or_refused", says="less likely")
class takes_the_long_factors_for_all(_Misreading):
    """A longrope model rotates short sequences with the factors of long ones."""

    def misread(self, given: dict[str, Any]) -> None:
        rope = given.get("rope_parameters") or {}
        if "long_factor" in rope:
            rope["short_factor"] = rope["long_factor"]


@mutant("generate/frequencies_that_depend_on_length_are_right_or_refused", says="with final_logit_softcapping")
class does_not_cap_logits(_Misreading):
    """final_logit_softcapping of a model is not applied, which changes no greedy token."""

    def misread(self, given: dict[str, Any]) -> None:
        if "final_logit_softcapping" in given:
            given["final_logit_softcapping"] = None


@mutant("generate/frequencies_that_depend_on_length_are_right_or_refused", says="with dynamic frequencies")
class scales_dynamic_frequencies_at_every_length(_Misreading):
    """A model's dynamic frequencies are scaled within its context, too."""

    def misread(self, given: dict[str, Any]) -> None:
        rope = given.get("rope_parameters") or {}
        if rope.get("rope_type") == "dynamic":
            given["rope_parameters"] = {"rope_type": "default", "rope_theta": 13 * rope["rope_theta"]}


@mutant("sessions/a_turn_replaces_what_followed_another", says="a turn goes on from one that was discarded")
class keeps_the_turns_after_discarded_ones(Sessions):
    """TurnMode.REPLACE discards the turns that follow its parent, and not those that follow these."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller)
        self._seen: dict[str, dict[str, Turn]] = {}

    def get(self, session_id: str) -> Session:
        session = super().get(session_id)
        seen = self._seen.setdefault(session_id, {})
        gone = seen.keys() - session.turns.keys()
        session.turns |= {one: seen[one] for one in gone if seen[one].parent in gone}
        seen |= session.turns
        return session


@mutant("sessions/an_answer_is_found_with_its_prompt", says="after an answer that ends at token")
class keeps_the_last_token_of_an_answer(CorrectBackend):
    """A block that an answer fills is cached although its last token was never run through the model."""

    _kept: set[tuple[int, ...]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        ids = list(request.prompt_token_ids)
        for kept in self._kept:
            if tuple(ids[: len(kept)]) == kept:
                ids[len(kept) - 1] = ids[0]
        result = await super().generate(dataclasses.replace(request, prompt_token_ids=ids))
        seen = (*request.prompt_token_ids, *result.token_ids)
        if len(seen) % 16 == 0:
            self._kept.add(seen)
        return result

    async def reset_prefix_cache(self) -> None:
        self._kept.clear()
        await super().reset_prefix_cache()
