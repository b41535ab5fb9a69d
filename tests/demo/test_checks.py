from __future__ import annotations

import math

import pytest

from drivetrain import Completion, FinishReason, VersionSpan
from drivetrain_demo.checks import check_logprobs, check_versions, versions_seen
from drivetrain_demo.result import StepRecord


def completion(tokens: int, *spans: tuple[str, int, int]) -> Completion:
    return Completion(
        request_id="r",
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=[1],
        token_ids=[7] * tokens,
        text="",
        finish_reason=FinishReason.LENGTH,
        weight_versions=tuple(VersionSpan(*span) for span in spans),
    )


def record(step: int, *versions: str, gap: float = 1e-6) -> StepRecord:
    return StepRecord(
        step=step,
        version=f"step-{step}",
        versions_seen=versions,
        reward=0.0,
        accuracy=0.0,
        logprob_gap=gap,
        completions=1,
        tokens=2,
        generate_seconds=1.0,
        example="",
        training=None,
    )


def test_one_span_over_all_tokens_is_one_version() -> None:
    assert versions_seen([completion(3, ("step-1", 0, 3)), completion(1, ("step-1", 0, 1))]) == ("step-1",)


@pytest.mark.parametrize(
    "odd",
    [
        completion(3, ("step-1", 0, 2)),
        completion(3, ("step-1", 1, 3)),
        completion(3, ("step-1", 0, 1), ("step-1", 2, 3)),
        completion(3),
        completion(0),
        completion(3, ("step-1", 0, 2), ("step-2", 2, 3)),
    ],
    ids=["end uncovered", "start uncovered", "gap", "no span", "no token", "two versions"],
)
def test_tokens_that_do_not_all_carry_one_version_are_seen(odd: Completion) -> None:
    assert versions_seen([completion(3, ("step-1", 0, 3)), odd]) != ("step-1",)


def test_a_rollout_under_another_version_fails_and_names_its_step() -> None:
    assert check_versions([record(0, "step-0"), record(1, "step-1")]).passed
    failed = check_versions([record(0, "step-0"), record(1, "step-0", "step-1")])
    assert not failed.passed
    assert "step 1: the completions carry step-0, step-1; expected step-1" in failed.detail


@pytest.mark.parametrize("gap", [0.02, math.inf, math.nan])
def test_a_gap_above_the_tolerance_fails_and_names_its_step(gap: float) -> None:
    assert check_logprobs([record(0, gap=0.01)], tolerance=0.01).passed
    failed = check_logprobs([record(0), record(1, gap=gap)], tolerance=0.01)
    assert not failed.passed
    assert f"step 1: engine and trainer differ by up to {gap:.3g} nats; at most 0.01" in failed.detail
