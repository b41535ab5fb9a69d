"""Scores are packed, checked and returned as arrays; wrong arguments are refused before any work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from drivetrain import TokenScores
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.checks.limits import MOST_SCORES
from drivetrain.engine.completions import aborted_before_start, to_completion
from drivetrain.engine.samples import Samples
from drivetrain.engine.scoring import ScoringCall
from drivetrain.errors import EngineInternalError, InvalidRequest, NonFiniteLogits
from drivetrain.types.outputs import FinishReason
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.token_scores import Scoring

IDS = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int64)
SCORING = Scoring(3, 0.5, top_k=1, width=2, packed_ids=IDS.astype("<i4").tobytes())


def scores(rows: int = 3, scoring: Scoring = SCORING) -> TokenScores:
    """Scores that count down from -1."""
    own = -1 - np.arange(rows, dtype=np.float32)
    top = own[:, None] + 1, np.full((rows, 1), 7, dtype=np.int32)
    return TokenScores.pack(scoring, own, np.stack([own, own * 2], axis=1), top)


def test_packed_numbers_come_back_as_arrays() -> None:
    found = scores()
    assert found.token_logprobs.tolist() == [-1, -2, -3]
    assert found.at_logprobs.tolist() == [[-1, -2], [-2, -4], [-3, -6]]
    assert (found.top_logprobs.tolist(), found.top_ids.tolist()) == ([[0], [-1], [-2]], [[7], [7], [7]])
    types = [array.dtype for array in (found.token_logprobs, found.at_logprobs, found.top_logprobs, found.top_ids)]
    assert types == [np.float32, np.float32, np.float32, np.int32]
    assert not found.at_logprobs.flags.writeable
    assert "positions=3" in repr(found)


def test_the_first_token_has_nan_and_no_ids() -> None:
    found = scores(rows=2)
    assert np.isnan(found.token_logprobs).tolist() == [True, False, False]
    assert np.isnan(found.at_logprobs).sum() == 2
    assert found.top_ids.tolist() == [[-1], [7], [7]]
    assert SCORING.scored(3) == 2
    assert SCORING.scored(4) == 3


def test_without_ids_and_likely_tokens_their_arrays_are_empty() -> None:
    found = TokenScores.pack(Scoring(2), np.array([-1, -2], dtype=np.float32))
    assert (found.at_logprobs.shape, found.top_logprobs.shape, found.top_ids.shape) == ((2, 0), (2, 0), (2, 0))


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: msgspec.convert(msgspec.to_builtins(one), TokenScores),
    ],
)
def test_scores_survive_a_copy(copied: Callable[[TokenScores], TokenScores]) -> None:
    assert copied(scores()) == scores()


def test_given_ids_are_packed() -> None:
    call = ScoringCall(at=[IDS, [[9]] * 4], temperature=2, last_n=[3, 4], top_k=5)
    first, second = call.scorings([7, 4], 10)
    assert first.ids().tolist() == IDS.tolist()
    assert (first.positions, first.width, first.top_k, first.temperature) == (3, 2, 5, 2.0)
    assert (second.positions, second.ids().tolist()) == (4, [[9]] * 4)


def test_all_positions_are_scored_by_default() -> None:
    (one,) = ScoringCall(temperature=1.0).scorings([6], 10)
    assert (one.positions, one.width, one.packed_ids) == (6, 0, b"")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_any_integers_are_taken(dtype: str) -> None:
    (one,) = ScoringCall(at=np.ones((1, 2, 3), dtype=dtype)).scorings([2], 10)
    assert one.ids().tolist() == [[1] * 3] * 2


class Unreadable:
    """An array that cannot be brought to host memory."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        raise TypeError("can't convert a device's tensor")


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("at[0]", ScoringCall(at=[Unreadable()])),
        ("at[0]", ScoringCall(at=[np.zeros((3, 11), dtype=np.int32)])),
        ("top_k", ScoringCall(top_k=11, last_n=1)),
        ("last_n", ScoringCall(last_n=4)),
        ("temperature", ScoringCall(temperature=float("nan"))),
    ],
)
def test_wrong_arguments_are_named(field: str, call: ScoringCall) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        call.scorings([3], 10)
    assert refusal.value.field == field


def test_too_many_scores_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=str(MOST_SCORES)):
        ScoringCall(top_k=2**15, last_n=2**14).scorings([2**14], 2**16)


# From a backend's result to a completion -----------------------------------------------------------------------------


def request(tokens: int = 5, scoring: Scoring | None = SCORING) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=0)
    return GenerateRequest("r", list(range(tokens)), params, 0, (), LogprobsMode.RAW, scoring=scoring)


def completed(asked: GenerateRequest, found: TokenScores | None) -> TokenScores | None:
    sample = Samples(asked, 0, lambda index: None, vocab_size=10).sample(0)
    result = GenerateResult([], FinishReason.LENGTH, [], scores=found)
    return to_completion(sample, result, None).scores  # type: ignore[arg-type]


def test_a_completion_has_the_scores() -> None:
    assert completed(request(), scores()) == scores()
    assert completed(request(3), scores(rows=2)) == scores(rows=2)
    assert completed(request(scoring=None), scores()) is None


@pytest.mark.parametrize(
    "found",
    [
        None,
        scores(rows=2),
        scores(scoring=replace(SCORING, temperature=1.0)),
        replace(scores(), packed_at=b""),
        replace(scores(), packed_tokens=b"\0" * 16),
        TokenScores.pack(Scoring(3, 0.5), np.zeros(3, dtype=np.float32)),
    ],
)
def test_other_scores_are_an_error_of_the_engine(found: TokenScores | None) -> None:
    with pytest.raises((EngineInternalError, NonFiniteLogits)):
        completed(request(), found)


def test_a_logprob_of_the_first_token_is_an_error_of_the_engine() -> None:
    with pytest.raises(EngineInternalError, match="first token"):
        completed(request(3), scores())


def test_nan_is_told_from_the_first_tokens() -> None:
    nan = replace(scores(rows=2), packed_at=np.full((3, 2), np.nan, dtype=np.float32).tobytes())
    with pytest.raises(NonFiniteLogits):
        completed(request(3), nan)


def test_a_sequence_of_one_token_is_the_pages_to_score() -> None:
    found = completed(request(1), None)
    assert found is not None
    assert found.fault(request(1).scoring, 1) == ""  # type: ignore[arg-type]
    assert np.isnan(found.token_logprobs).all()
    with pytest.raises(EngineInternalError, match="there are no scores"):
        completed(request(2), None)


def test_an_aborted_request_needs_no_scores() -> None:
    sample = Samples(request(), 0, lambda index: None, vocab_size=10).sample(0)
    assert to_completion(sample, aborted_before_start(sample), None).scores is None  # type: ignore[arg-type]
