"""Requests that had begun on an engine that is lost go on from their tokens, where that is exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from drivetrain import Completion, EngineDied, FinishReason, InferenceEngine, MemberLost, SamplingParams, attach
from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.process.shared_engine import SharedEngine
from drivetrain.types.outputs import GenerationOutput, VersionSpan
from drivetrain.types.prompts import PromptLike
from drivetrain.types.sampling import ActionMask, LogprobsMode, RegexGrammar, TemperatureSchedule
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_conformance.harness.time_limits import within
from drivetrain_fleet.members import Member
from drivetrain_fleet.resuming import SoFar, not_resumable
from drivetrain_weight_sync import WeightSync
from fleets import BOUND, Fleet, Spoiled, kill_host, local, paused_in_flight, tensors_for, until

TOKENS = 300
PARAMS = SamplingParams(max_new_tokens=TOKENS, min_new_tokens=250, temperature=0.0, logprobs=1)
PROMPTS = [[i + 1, i + 2, i + 3] for i in range(4)]


async def streamed(
    fleet: InferenceEngine, prompt: PromptLike, params: SamplingParams
) -> tuple[Completion, list[int], str]:
    """Stream one completion; return it with the ids and the text of its chunks."""
    ids: list[int] = []
    text, last = "", None
    async for chunk in fleet.generate_stream(prompt, params):
        ids += chunk.token_ids
        text, last = text + chunk.text, chunk.completion or last
    assert last is not None
    return last, ids, text


async def whole(
    fleet: InferenceEngine, prompt: PromptLike, params: SamplingParams
) -> tuple[Completion, list[int], str]:
    """Generate one completion."""
    (one,) = (await fleet.generate(prompt, params)).completions
    return one, one.token_ids, one.text


@pytest.mark.slow
@pytest.mark.parametrize("call", [streamed, whole])
async def test_greedy_answers_equal_those_of_an_unbroken_run(model: Path, call: object) -> None:
    ask = streamed if call is streamed else whole
    hosted = local(model, isolation="process")
    async with Fleet({"hosted": hosted, "other": local(model)}, resume=True) as fleet:
        expected = [(await ask(fleet, prompt, PARAMS))[0] for prompt in PROMPTS]
        tasks = [asyncio.create_task(ask(fleet, prompt, PARAMS)) for prompt in PROMPTS]
        await until(lambda: sum(ticket.made > 20 for ticket in fleet.backend.sending.of(fleet.member("hosted"))) == 2)
        kill_host(hosted)
        async with within(seconds=BOUND):
            found = await asyncio.gather(*tasks)
        assert fleet.health() == ["failed", "ready"]
    for (completion, ids, text), unbroken in zip(found, expected, strict=True):
        assert completion.token_ids == ids == unbroken.token_ids
        assert completion.text == text == unbroken.text
        assert completion.finish_reason is unbroken.finish_reason
        assert completion.prompt_token_ids == unbroken.prompt_token_ids
        assert completion.weight_versions == unbroken.weight_versions
        assert completion.logprobs == pytest.approx(unbroken.logprobs, abs=1e-4)
        assert completion.top_logprobs is not None
        assert len(completion.top_logprobs) == len(ids)


LETTERS = tuple(range(ord("a"), ord("z") + 1))
BREAK = 24
"""Tokens that a request has when its engine is lost."""


def drawn(**fields: object) -> SamplingParams:
    """Return parameters of a request that draws 60 letters with a seed; each is one token."""
    base = {"max_new_tokens": 60, "seed": 7, "logprobs": 2, "logit_processors": [ActionMask(allowed_token_ids=LETTERS)]}
    return SamplingParams.model_validate({**base, **fields})


def resumable(unbroken: Completion) -> dict[str, SamplingParams]:
    """Return requests whose answer depends on the tokens before the break; ``unbroken`` is what ``drawn()`` gets."""
    text = unbroken.text
    spanning, late = text[BREAK - 2 : BREAK + 2], text[BREAK + 10 : BREAK + 14]
    assert text.find(spanning) == BREAK - 2
    early = text[5:8]
    mask = ActionMask(allowed_token_ids=LETTERS)
    return {
        "seed": drawn(),
        "seed of its own": drawn(seed=8, top_p=0.9, temperature=1.3),
        "greedy": drawn(temperature=0.0, seed=None),
        "frequency_penalty": drawn(frequency_penalty=0.9),
        "presence_penalty": drawn(presence_penalty=1.5, temperature=0.0),
        "repetition_penalty": drawn(repetition_penalty=1.4),
        "schedule": drawn(logit_processors=[mask, TemperatureSchedule(start=0.3, end=3.0, steps=50)]),
        "min_new_tokens": drawn(min_new_tokens=40, stop_token_ids=unbroken.token_ids[:BREAK]),
        "stop token": drawn(min_new_tokens=BREAK + 4, stop_token_ids=[unbroken.token_ids[BREAK + 8]]),
        "spanning stop": drawn(stop=(spanning,)),
        "spanning stop, included": drawn(stop=(spanning,), include_stop_str_in_output=True),
        "late stop": drawn(stop=("zzzzzz", late)),
        "early stop held back": drawn(stop=(early, late), min_new_tokens=BREAK + 2),
        "spanning regex": drawn(stop_regex=(f"{spanning[:2]}.{spanning[3]}",)),
        "processed logprobs": drawn(logprobs_mode="processed", top_k=4, frequency_penalty=0.5),
        "sampling mask": drawn(top_p=0.8, return_sampling_mask=True),
        "sampling mask, stopped": drawn(top_k=9, return_sampling_mask=True, stop=(spanning,)),
    }


def lost_at(member: Member, tokens: int, lost: asyncio.Event, begun: list[str]) -> None:
    """Give each request of a member this many tokens, and no more: then it waits for the member's end."""
    calls = member.calls

    async def stream(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        made = 0
        async with aclosing(calls.stream(request)) as deltas:
            async for delta in deltas:
                yield delta
                made += len(delta.token_ids)
                if made == tokens:
                    begun.append(request.request_id)
                    await lost.wait()
                    raise EngineDied(str(await member.engine.parts.backend.died()))

    member.calls = cast(SharedEngine, Spoiled(calls, stream=stream))  # type: ignore[arg-type]


def has(items: list[str], count: int) -> bool:
    """Return True if there are that many."""
    return len(items) == count


async def test_requests_are_answered_as_if_no_engine_was_lost(model: Path) -> None:
    async with local(model) as engine:
        (first,) = (await engine.generate("hello", drawn())).completions
        cases = resumable(first)
        expected = {name: (await engine.generate("hello", one)).completions[0] for name, one in cases.items()}
    hosted, again = local(model, isolation="process"), local(model, isolation="process")
    async with Fleet({"hosted": hosted}, resume=True) as fleet:
        names = list(cases)
        calls = [streamed if index % 2 else whole for index in range(len(names))]
        tasks = [
            asyncio.create_task(call(fleet, "hello", cases[name])) for name, call in zip(names, calls, strict=True)
        ]
        for engine, successor, tokens in ((hosted, again, BREAK), (again, local(model), 1)):
            lost, begun = asyncio.Event(), list[str]()
            name = fleet.members[-1].name
            lost_at(fleet.member(name), tokens, lost, begun)
            await until(partial(has, begun, len(names)))
            await fleet.add(successor)
            kill_host(engine)
            lost.set()
        async with within(seconds=BOUND):
            found = dict(zip(names, await asyncio.gather(*tasks), strict=True))
    for name, (completion, ids, text) in found.items():
        unbroken = expected[name]
        assert ids == completion.token_ids, name
        assert text == completion.text, name
        assert (name, completion.text) == (name, unbroken.text)
        fields = ("token_ids", "finish_reason", "matched_stop", "weight_versions", "prompt_token_ids", "sampling_mask")
        for field in fields:
            assert (name, field, getattr(completion, field)) == (name, field, getattr(unbroken, field))
        assert completion.logprobs == pytest.approx(unbroken.logprobs, abs=1e-4), name
        assert completion.top_logprobs is not None
        assert [[i for i, _ in top] for top in completion.top_logprobs] == [
            [i for i, _ in top] for top in unbroken.top_logprobs or []
        ], name


@pytest.mark.parametrize(
    ("field", "value", "counted"),
    [("prompt_logprobs", 0, True), ("seed", 1, False), ("frequency_penalty", 0.5, False)],
)
async def test_a_request_that_needs_the_lost_state_is_named_by_field(
    model: Path, field: str, value: object, counted: bool
) -> None:
    hosted, other = local(model, isolation="process"), local(model)
    vars(other.parts.backend)["counts_resumed_tokens"] = counted
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0.7, ignore_eos=True, **{field: value})  # type: ignore[arg-type]
    async with Fleet({"hosted": hosted, "other": other}, resume=True) as fleet:

        def start() -> list[asyncio.Task[GenerationOutput]]:
            return [asyncio.create_task(fleet.generate([i + 1], params)) for i in range(2)]

        tasks = await paused_in_flight(fleet, start, 1, "hosted")
        kill_host(hosted)
        async with within(seconds=BOUND):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        (error,) = [one for one in found if isinstance(one, BaseException)]
        assert isinstance(error, MemberLost)
        assert f"because of {field}" in str(error)


async def test_stops_through_a_handle_to_a_fleet_that_resumes_are_found(model: Path) -> None:
    async with local(model) as engine, Fleet({"one": local(model)}, resume=True) as fleet:
        text = (await engine.generate("hello", drawn())).completions[0].text
        stopping = drawn(stop=(text[10:14],))
        (expected,) = (await engine.generate("hello", stopping)).completions
        holder = await attach(await fleet.handle())
        found, ids, shown = await streamed(holder, "hello", stopping)
        await holder.teardown()
        assert (found.token_ids, found.text, found.matched_stop) == (ids, shown, text[10:14])
        assert (expected.token_ids, expected.text) == (ids, shown)


async def test_spans_tell_the_version_of_each_engine(model: Path) -> None:
    hosted = local(model, isolation="process")
    params = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
    async with Fleet({"hosted": hosted, "other": local(model)}, resume=True, max_staleness=1) as fleet:
        task = asyncio.create_task(fleet.generate([[1, 2], [3, 4]], params))
        await until(lambda: fleet.begun("hosted") == fleet.begun("other") == 1)
        tensors = await tensors_for(fleet)
        member = fleet.member("hosted")
        prepare = member.calls.prepare_weight_update

        async with WeightSync.connect(tensors, fleet) as sync:
            member.calls.prepare_weight_update = lambda request: _killing(hosted, prepare(request))  # type: ignore[method-assign]
            await sync.push(version="one")
        async with within(seconds=BOUND):
            output = await task
    for completion in output.completions:
        spans = completion.weight_versions
        assert [span.version for span in spans] == ["initial", "one"]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 900)


async def _killing(hosted: object, preparing: object) -> None:
    kill_host(hosted)  # type: ignore[arg-type]
    await preparing  # type: ignore[misc]


def request(**fields: object) -> GenerateRequest:
    params = SamplingParams.model_validate(fields)
    return GenerateRequest("r", [1, 2], params, 10, (7,), LogprobsMode.RAW, seed=params.seed)


@pytest.mark.parametrize(("counted", "least", "resumed"), [(True, 4, 3), (False, 1, 0)])
def test_the_rest_is_asked_for_and_joined(counted: bool, least: int, resumed: int) -> None:
    so_far = SoFar(request(min_new_tokens=4, stop=("a",), include_stop_str_in_output=True))
    so_far.add(TokenDelta([5, 6, 5]))
    assert so_far.resume("a", counted=counted) == ""
    asked = so_far.request
    assert (asked.prompt_token_ids, asked.max_new_tokens) == ([1, 2, 5, 6, 5], 7)
    assert (asked.params.min_new_tokens, asked.resumed_tokens, asked.params.stop) == (least, resumed, ())
    result = GenerateResult([8, 7], FinishReason.STOP, [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2)], matched_stop=7)
    joined = so_far.joined(result)
    assert joined.token_ids == [5, 6, 5, 8, 7]
    assert joined.weight_versions == [VersionSpan("a", 0, 4), VersionSpan("b", 4, 5)]


def test_a_sample_that_lacks_only_its_result_has_ended() -> None:
    so_far = SoFar(request())
    so_far.add(TokenDelta([5, 7]))
    so_far.resume("a", counted=True)
    ended = so_far.ended()
    assert ended is not None
    assert (ended.finish_reason, ended.matched_stop, ended.token_ids) == (FinishReason.STOP, 7, [5, 7])


def test_masks_of_both_engines_are_joined() -> None:
    first, rest = SamplingMask.of(9, [[5], [6, 7], [5]]), SamplingMask.of(9, [range(9)])
    so_far = SoFar(request(return_sampling_mask=True))
    so_far.add(TokenDelta([5, 6], sampling_mask=first[:2]))
    so_far.add(TokenDelta([5], sampling_mask=first[2:]))
    assert so_far.resume("a", counted=True) == ""
    result = GenerateResult([8], FinishReason.LENGTH, [VersionSpan("a", 0, 1)], sampling_mask=rest)
    assert so_far.joined(result).sampling_mask == first + rest
    aborted = GenerateResult([], FinishReason.ABORT, [])
    assert so_far.joined(aborted).sampling_mask == first
    lacking = SoFar(request(return_sampling_mask=True))
    lacking.add(TokenDelta([5, 6], sampling_mask=first[:1]))
    assert "sampling mask" in lacking.resume("a", counted=True)


def test_an_engine_that_does_not_count_resumed_tokens_gets_no_request_that_depends_on_them() -> None:
    schedule = TemperatureSchedule(start=1.0, end=2.0, steps=9)
    asked = request(seed=1, frequency_penalty=1.0, presence_penalty=1.0, logit_processors=[schedule])
    fields = ("frequency_penalty", "presence_penalty", "seed", "logit_processors")
    assert not_resumable(asked, counted=False) == fields
    assert not_resumable(asked, counted=True) == ()
    masked = request(seed=1, temperature=0.0, logit_processors=[ActionMask(allowed_token_ids=(1,))], stop=("a",))
    assert not_resumable(masked, counted=False) == ()
    assert not_resumable(request(structured_output=RegexGrammar(regex="a+")), counted=True) == ("structured_output",)
