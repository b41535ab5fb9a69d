"""The runner: its checks before and after a body, and its conclusions about each capability."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from drivetrain import Capability, FinishReason, PauseMode, SamplingParams
from drivetrain_conformance.assertions.same_answers import check_greedy
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.cases import GROUPS, all_cases
from drivetrain_conformance.harness.capability_results import CapabilityResults
from drivetrain_conformance.harness.case import Body, Case, Hardware
from drivetrain_conformance.harness.run_profile import LEFT_OUT, PROFILES, Profile
from drivetrain_conformance.harness.runner import CaseResult, Runner
from drivetrain_conformance.harness.suite import suite_of
from drivetrain_conformance.harness.testbench import Bench, in_time
from drivetrain_conformance.harness.verdict import Judgement, Verdict

QUICK = Profile("quick", examples=1, histories=1, steps=1, samples=16, cycles=1, case_timeout=60)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(suite_of("transformers")(), profile=QUICK) as made:
        yield made


def run(runner: Runner, body: Body, *needs: Capability, own_engine: bool = False, **fields: object) -> CaseResult:
    hardware = fields.pop("hardware", Hardware.ANY)
    changes_weights = bool(fields.pop("changes_weights", False))
    kind = fields.pop("kind", ModelKind.TEXT)
    assert isinstance(hardware, Hardware)
    assert isinstance(kind, ModelKind)
    case = Case(
        "made_up",
        getattr(body, "__name__", "body"),
        "A made-up case.",
        frozenset(needs),
        body,
        model=kind,
        config=fields,
        hardware=hardware,
        own_engine=own_engine,
        changes_weights=changes_weights,
    )
    return runner.execute(case)


def test_a_body_that_ends_passes(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        await bench.engine.generate("x", SamplingParams(max_new_tokens=1))

    assert run(runner, body).verdict is Verdict.PASSED


def test_a_plain_body_runs_coroutines_by_itself(runner: Runner) -> None:
    def body(bench: Bench) -> None:
        assert len(bench.run(bench.greedy(bench.prompts(2)))) == 2

    assert run(runner, body).verdict is Verdict.PASSED


def test_an_answer_that_was_aborted_before_its_first_token_is_no_wrong_one(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        async with bench.open() as engine:
            output = await engine.generate([bench.prompt(6, engine)], SamplingParams(max_new_tokens=0))
            assert not output.completions[0].token_ids
            check_greedy(bench, output.completions[0], engine)
            assert bench.output_logits(output.completions[0]).shape == (0, engine.model_info.vocab_size)

    result = run(runner, body, own_engine=True)
    assert result.verdict is Verdict.PASSED, result.judgement.message


def test_a_case_that_came_too_late_is_tried_again_with_longer_requests(runner: Runner) -> None:
    lengths: list[int] = []

    async def body(bench: Bench) -> None:
        bench.tokens_per_second = 0.0  # the lengths of any machine
        lengths.append(bench.long(100).max_new_tokens or 0)
        async with bench.in_flight([bench.prompt()], bench.long(100), request_ids=["late"]) as task:
            if bench.attempt < 2:
                await task
            await bench.engine.abort("late")
            (completion,) = (await task).completions
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT
        assert completion.token_ids, "it was entered before the request had a token"

    result = run(runner, body)
    assert result.verdict is Verdict.PASSED, result.judgement.message
    assert lengths[:3] == [100, 200, 400]


def test_what_is_wrong_however_early_fails_as_itself(runner: Runner) -> None:
    attempts: list[int] = []

    async def ended(bench: Bench) -> None:
        attempts.append(bench.attempt)
        (completion,) = (await bench.engine.generate("x", SamplingParams(max_new_tokens=1))).completions
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT, "aborts are ignored"

    async def aborted(bench: Bench) -> None:
        attempts.append(bench.attempt)
        async with bench.in_flight([bench.prompt()], bench.long()) as task:
            await bench.engine.abort_generation()
            (completion,) = (await task).completions
        with in_time(completion):
            assert not completion.token_ids, "it has tokens"

    assert run(runner, ended).judgement.message.startswith("AssertionError: aborts are ignored")
    assert len(attempts) > 1
    attempts.clear()
    assert run(runner, aborted).judgement.message.startswith("AssertionError: it has tokens")
    assert attempts == [0]


def test_a_refusal_of_what_is_unclaimed_is_refused(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        await bench.engine.start_profile("nowhere")

    assert run(runner, body, Capability.PROFILE).verdict is Verdict.REFUSED


def test_a_case_whose_model_has_only_a_part_of_what_it_needs_is_refused_for_all_that_the_text_model_lacks(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run on the text model, which may refuse another part of it."""
    own, experts = runner.suite.claims, frozenset({Capability.ROUTED_EXPERTS})
    moe = str(runner.models.path(ModelKind.MOE))

    def claims(fields: Mapping[str, object]) -> frozenset[Capability]:
        claimed = own(fields) - {Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS}
        return claimed | experts if fields["model"] == moe else claimed

    monkeypatch.setattr(runner.suite, "claims", claims)

    async def body(bench: Bench) -> None:
        await bench.engine.generate([5], {"return_routed_experts": True, "return_prompt_routed_experts": True})

    needs = (Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS)
    assert run(runner, body, *needs, kind=ModelKind.MOE).verdict is Verdict.REFUSED


def test_a_configuration_that_is_refused_counts_as_the_refusal(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        raise AssertionError("never reached")

    assert run(runner, body, Capability.TENSOR_PARALLEL, tensor_parallel_size=2).verdict is Verdict.REFUSED


def test_what_is_claimed_in_another_configuration_alone_is_looked_at_there() -> None:
    class Elsewhere(suite_of("transformers")):  # type: ignore[misc]
        fields: Mapping[str, object] = {"enable_prefix_caching": False}
        elsewhere: ClassVar[tuple[Mapping[str, object], ...]] = ({"enable_prefix_caching": True},)

    async def body(bench: Bench) -> None:
        await bench.engine.reset_prefix_cache()

    async def own(bench: Bench) -> None:
        async with bench.open() as engine:
            await engine.reset_prefix_cache()

    with Runner(Elsewhere(), profile=QUICK) as made:
        assert run(made, body, Capability.PREFIX_CACHE).verdict is Verdict.PASSED
        assert run(made, body, Capability.PREFIX_CACHE, enable_prefix_caching=False).verdict is Verdict.REFUSED
        assert run(made, own, Capability.PREFIX_CACHE, own_engine=True).verdict is Verdict.PASSED


def test_a_body_that_hangs_fails_and_the_next_one_runs(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        await asyncio.get_running_loop().create_future()

    with Runner(suite_of("transformers")(), profile=dataclasses.replace(QUICK, case_timeout=1)) as impatient:
        result = run(impatient, body)
        assert result.verdict is Verdict.FAILED
        assert "hangs" in result.judgement.message
        impatient.profile = QUICK
        test_a_body_that_ends_passes(impatient)


def test_a_busy_machine_gives_a_case_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))

    async def body(bench: Bench) -> None:
        await asyncio.sleep(0.6)

    with Runner(suite_of("transformers")(), profile=dataclasses.replace(QUICK, case_timeout=0.3)) as judging:
        assert run(judging, body, own_engine=True).verdict is Verdict.PASSED


def test_a_body_that_leaves_the_engine_paused_fails_and_the_next_one_gets_a_ready_engine(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        await bench.engine.pause_generation(PauseMode.WAIT)

    result = run(runner, body, Capability.PAUSE_WAIT)
    assert result.verdict is Verdict.FAILED
    assert "state was 'ready' and is 'paused'" in result.judgement.message
    test_a_body_that_ends_passes(runner)


def test_a_refusal_that_changed_something_fails(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        await bench.engine.update_weight_version("other")
        await bench.engine.start_profile("nowhere")

    result = run(runner, body, Capability.VERSION_SPANS, Capability.PROFILE)
    assert result.verdict is Verdict.FAILED
    assert "weight version was 'initial'" in result.judgement.message


def test_weights_that_a_case_changed_are_put_back(runner: Runner) -> None:
    async def body(bench: Bench) -> None:
        await bench.engine.load_weights_from_disk(str(bench.other_weights()), "other")

    async def look(bench: Bench) -> None:
        assert bench.engine.get_weight_version() == "initial"
        (completion,) = await bench.greedy([bench.prompt()])
        logprobs = bench.output_logits(completion)
        assert all(row[token] == row.max() for row, token in zip(logprobs, completion.token_ids, strict=True))

    assert run(runner, body, Capability.WEIGHTS_DISK, changes_weights=True).verdict is Verdict.PASSED
    assert run(runner, look).verdict is Verdict.PASSED
    assert run(runner, body, Capability.WEIGHTS_DISK).verdict is Verdict.FAILED


def test_a_process_left_behind_fails(runner: Runner) -> None:
    left: list[subprocess.Popen[bytes]] = []

    async def body(bench: Bench) -> None:
        async with bench.open():
            left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))  # noqa: ASYNC220

    result = run(runner, body, own_engine=True)
    assert result.verdict is Verdict.FAILED
    assert "left behind" in result.judgement.message
    assert left[0].wait(60) != 0


@pytest.mark.parametrize(("gpus", "hardware"), [(0, Hardware.GPU), (1, Hardware.TWO_GPUS), (1, Hardware.TWO_RANKS)])
def test_what_the_machine_lacks_is_not_run_and_still_refused_where_unclaimed(
    gpus: int, hardware: Hardware, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain_conformance.harness.runner.gpu_count", lambda: gpus)

    async def body(bench: Bench) -> None:
        bench.create(tensor_parallel_size=2)

    claimed = run(runner, body, Capability.STREAMING, hardware=hardware)
    assert claimed.verdict is Verdict.NOT_RUN
    unclaimed = run(runner, body, Capability.TENSOR_PARALLEL, hardware=hardware)
    assert unclaimed.verdict is Verdict.REFUSED


# Conclusions ---------------------------------------------------------------------------------------------------------


def concluded(
    capability_results: CapabilityResults, capability: Capability, *, complete: bool = True
) -> tuple[Verdict, str]:
    item = next(item for item in capability_results.conclude(complete=complete) if item.capability is capability)
    return item.verdict, item.message


def conclusion_from(verdicts: list[Verdict], *, claimed: bool) -> tuple[Verdict, str]:
    async def body(bench: Bench) -> None: ...

    capability_results = CapabilityResults()
    if claimed:
        capability_results.claim({Capability.SEED})
    for index, verdict in enumerate(verdicts):
        capability_results.record(f"g/{index}", {Capability.SEED}, verdict)
    return concluded(capability_results, Capability.SEED)


def test_a_claim_that_no_case_saw_working_is_a_failure() -> None:
    assert conclusion_from([], claimed=True) == (Verdict.FAILED, "claimed, but no case of it passed")
    assert conclusion_from([Verdict.REFUSED], claimed=True)[0] is Verdict.FAILED
    assert conclusion_from([Verdict.REFUSED, Verdict.PASSED], claimed=True)[0] is Verdict.PASSED


def test_an_engine_that_a_body_makes_otherwise_claims_nothing_for_the_run() -> None:
    async def body(bench: Bench) -> None:
        assert Capability.WEIGHTS_IN_PROCESS not in bench.create(isolation="process").capabilities
        assert Capability.LORA in bench.create(enable_lora=True).capabilities

    with Runner(suite_of("transformers")(), profile=QUICK) as made:
        assert run(made, body).verdict is Verdict.PASSED
        claimed = {one.capability for one in made.capability_results.conclude(complete=False) if one.claimed}
    assert Capability.WEIGHTS_IN_PROCESS in claimed
    assert Capability.LORA not in claimed


def test_what_was_not_run_is_never_supported() -> None:
    assert conclusion_from([Verdict.NOT_RUN], claimed=True)[0] is Verdict.NOT_RUN
    assert conclusion_from([], claimed=False)[0] is Verdict.NOT_RUN
    assert conclusion_from([Verdict.REFUSED], claimed=False)[0] is Verdict.REFUSED


def test_one_failed_case_fails_its_capabilities() -> None:
    assert conclusion_from([Verdict.PASSED, Verdict.FAILED], claimed=True) == (Verdict.FAILED, "g/1")
    assert conclusion_from([Verdict.PASSED, Verdict.KNOWN_FAILURE], claimed=True)[0] is Verdict.KNOWN_FAILURE


# The cases themselves ------------------------------------------------------------------------------------------------


def test_every_capability_is_needed_by_a_case() -> None:
    needed = {capability for case in all_cases() for capability in case.needs}
    assert {capability.value for capability in Capability} - {capability.value for capability in needed} == set()


def test_every_capability_and_every_group_is_seen_without_the_slow_cases() -> None:
    quick = [case for case in all_cases() if not case.slow]
    assert set(Capability) - {capability for case in quick for capability in case.needs} == set()
    assert {case.group for case in quick} == set(GROUPS)


def test_a_slow_case_is_run_unless_the_profile_leaves_slow_cases_out() -> None:
    ran: list[str] = []

    def body(bench: Bench) -> None:
        ran.append(bench.profile.name)

    slow = Case("made_up", "slow", "A made-up case.", frozenset(), body, own_engine=True, slow=True)
    found = {}
    for name in ("quick", "smoke", "ci"):
        with Runner(suite_of("transformers")(), profile=PROFILES[name]) as runner:
            found[name] = runner.execute(slow).judgement
    assert ran == ["smoke", "ci"]
    assert found["quick"] == Judgement(Verdict.NOT_RUN, LEFT_OUT)
    assert {found["smoke"].verdict, found["ci"].verdict} == {Verdict.PASSED}


def test_every_group_has_cases_that_say_what_must_hold() -> None:
    cases = all_cases()
    assert {case.group for case in cases} == set(GROUPS)
    assert [case.id for case in cases if not case.summary.endswith(".")] == []


def test_cases_with_engines_of_their_own_come_last_and_the_others_side_by_side() -> None:
    cases = all_cases()
    own = [case.own_engine for case in cases]
    assert own == sorted(own)
    engines = [repr((case.model, sorted(case.config.items()))) for case in cases if not case.own_engine]
    changes = sum(one != other for one, other in itertools.pairwise(engines))
    assert changes == len(set(engines)) - 1
