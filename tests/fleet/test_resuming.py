"""Requests that had begun on an engine that is lost go on from their tokens, where that is exact."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from drivetrain import Completion, FinishReason, MemberLost, SamplingParams
from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.types.outputs import VersionSpan
from drivetrain.types.sampling import LogprobsMode
from drivetrain_fleet.resuming import SoFar, not_resumable
from drivetrain_weight_sync import WeightSync
from fleets import BOUND, Fleet, kill_host, local, tensors_for, until

TOKENS = 300
PARAMS = SamplingParams(max_new_tokens=TOKENS, min_new_tokens=250, temperature=0.0, logprobs=1)
PROMPTS = [[i + 1, i + 2, i + 3] for i in range(4)]


async def streamed(fleet: Fleet, prompt: list[int], params: SamplingParams) -> tuple[Completion, list[int], str]:
    """Stream one completion; return it with the ids and the text of its chunks."""
    ids: list[int] = []
    text, last = "", None
    async for chunk in fleet.generate_stream(prompt, params):
        ids += chunk.token_ids
        text, last = text + chunk.text, chunk.completion or last
    assert last is not None
    return last, ids, text


async def whole(fleet: Fleet, prompt: list[int], params: SamplingParams) -> tuple[Completion, list[int], str]:
    """Generate one completion."""
    (one,) = (await fleet.generate(prompt, params)).completions
    return one, one.token_ids, one.text


@pytest.mark.parametrize("call", [streamed, whole])
async def test_greedy_answers_equal_those_of_an_unbroken_run(model: Path, call: object) -> None:
    ask = streamed if call is streamed else whole
    hosted = local(model, isolation="process")
    async with Fleet({"hosted": hosted, "other": local(model)}, resume=True) as fleet:
        expected = [(await ask(fleet, prompt, PARAMS))[0] for prompt in PROMPTS]
        tasks = [asyncio.create_task(ask(fleet, prompt, PARAMS)) for prompt in PROMPTS]
        await until(lambda: sum(ticket.made > 20 for ticket in fleet.backend.sending.of(fleet.member("hosted"))) == 2)
        kill_host(hosted)
        async with asyncio.timeout(BOUND):
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


@pytest.mark.parametrize(
    ("field", "value"), [("seed", 1), ("frequency_penalty", 0.5), ("stop", ("zzzz",)), ("prompt_logprobs", 0)]
)
async def test_a_request_that_needs_the_lost_state_is_named_by_field(model: Path, field: str, value: object) -> None:
    hosted = local(model, isolation="process")
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0.7, ignore_eos=True, **{field: value})  # type: ignore[arg-type]
    async with Fleet({"hosted": hosted, "other": local(model)}, resume=True) as fleet:
        tasks = [asyncio.create_task(fleet.generate([i + 1], params)) for i in range(2)]
        await until(lambda: fleet.begun("hosted") == 1)
        kill_host(hosted)
        async with asyncio.timeout(BOUND):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        (error,) = [one for one in found if isinstance(one, BaseException)]
        assert isinstance(error, MemberLost)
        assert f"because of {field}" in str(error)


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
        async with asyncio.timeout(BOUND):
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
    return GenerateRequest("r", [1, 2], params, 10, (7,), LogprobsMode.RAW)


def test_the_rest_is_asked_for_and_joined() -> None:
    so_far = SoFar(request(min_new_tokens=4))
    so_far.add(TokenDelta([5, 6, 5]))
    assert so_far.resume("a") == ""
    asked = so_far.request
    assert (asked.prompt_token_ids, asked.max_new_tokens, asked.params.min_new_tokens) == ([1, 2, 5, 6, 5], 7, 1)
    result = GenerateResult([8, 7], FinishReason.STOP, [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2)], matched_stop=7)
    joined = so_far.joined(result)
    assert joined.token_ids == [5, 6, 5, 8, 7]
    assert joined.weight_versions == [VersionSpan("a", 0, 4), VersionSpan("b", 4, 5)]


def test_a_sample_that_lacks_only_its_result_has_ended() -> None:
    so_far = SoFar(request())
    so_far.add(TokenDelta([5, 7]))
    so_far.resume("a")
    ended = so_far.ended()
    assert ended is not None
    assert (ended.finish_reason, ended.matched_stop, ended.token_ids) == (FinishReason.STOP, 7, [5, 7])


def test_a_seed_matters_only_where_something_is_drawn() -> None:
    assert not_resumable(request(seed=1, temperature=0.0)) == ()
    assert not_resumable(request(seed=1)) == ("seed",)
