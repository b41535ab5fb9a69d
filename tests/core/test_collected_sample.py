"""A sample is put together from chunks, with a version span for each change of the weights."""

from __future__ import annotations

import math

from drivetrain.backend.base import GenerateRequest
from drivetrain.backend.toolkit.collected_sample import CollectedSample
from drivetrain.types.outputs import VersionSpan
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.sampling_mask import SamplingMask


def sample(logprobs: int | None) -> CollectedSample:
    params = SamplingParams(logprobs=logprobs)
    return CollectedSample(GenerateRequest("one", [1], params, 8, (), LogprobsMode.RAW))


def test_chunks_are_joined() -> None:
    collected = sample(logprobs=1)
    first = ([5, 6], [-0.5, -0.25], [[(5, -0.5)], [(6, -0.25)]])
    assert collected.extend(*first) == first
    collected.extend([7], [-1.0], [[(7, -1.0)]])
    assert collected.token_ids == [5, 6, 7]
    assert collected.logprobs == [-0.5, -0.25, -1.0]
    assert collected.top_logprobs == [[(5, -0.5)], [(6, -0.25)], [(7, -1.0)]]


def test_logprobs_that_nobody_asked_for_are_none() -> None:
    collected = sample(logprobs=None)
    collected.extend([5], None, None)
    assert (collected.logprobs, collected.top_logprobs) == (None, None)
    chosen = sample(logprobs=0)
    chosen.extend([5], [-0.5], None)
    assert (chosen.logprobs, chosen.top_logprobs) == ([-0.5], None)


def test_masks_are_joined() -> None:
    collected = CollectedSample(GenerateRequest("one", [1], SamplingParams(), 8, (), LogprobsMode.RAW))
    assert (collected.sampling_mask, collected.added_mask) == (None, None)
    first, second = SamplingMask.of(9, [[5], [6, 7]]), SamplingMask.of(9, [range(9)])
    collected.extend([5, 6], None, None, first)
    collected.extend([7], None, None, second)
    assert collected.added_mask == second
    assert collected.sampling_mask == first + second


def test_versions_are_those_that_the_engine_reports() -> None:
    collected = sample(logprobs=None)
    collected.extend([5, 6, 7], None, None)
    collected.replaced("ignored", 1)
    assert collected.weight_versions([("a", 2.0), ("b", 3.0)], "c") == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]


def test_without_a_report_versions_follow_from_the_changes() -> None:
    collected = sample(logprobs=None)
    collected.extend([5, 6, 7], None, None)
    collected.replaced("a", 2)
    assert collected.weight_versions(None, "b") == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]
    collected.replaced("b", math.inf)
    assert collected.weight_versions(None, "c") == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]
