"""A sampling mask gives back the ids that were packed, in the shortest form, whatever is cut, joined or sent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import SamplingMask
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.engine.completions import aborted_before_start, to_completion
from drivetrain.engine.samples import Samples
from drivetrain.errors import EngineInternalError
from drivetrain.types.outputs import FinishReason, MatchedText, VersionSpan
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.sampling_mask import MaskForm, form_of

Positions = list[set[int]]


@st.composite
def positions(draw: st.DrawFn) -> tuple[int, Positions]:
    """A vocabulary size, and sets of every density."""
    vocabulary = draw(st.integers(1, 200))
    ids = st.sets(st.integers(0, vocabulary - 1))
    everything = set(range(vocabulary))
    some = st.one_of(ids, ids.map(lambda left: everything - left), st.just(everything), st.just(set[int]()))
    return vocabulary, draw(st.lists(some, max_size=6))


@given(positions())
def test_the_packed_ids_come_back(made: tuple[int, Positions]) -> None:
    vocabulary, sets = made
    mask = SamplingMask.of(vocabulary, sets)
    assert [mask.ids(at) for at in range(len(mask))] == [sorted(left) for left in sets]
    assert [mask.count(at) for at in range(len(mask))] == [len(left) for left in sets]
    assert [mask.is_unrestricted(at) for at in range(len(mask))] == [len(left) == vocabulary for left in sets]
    expected = np.array([[one in left for one in range(vocabulary)] for left in sets], dtype=bool)
    assert np.array_equal(mask.to_numpy(), expected.reshape(len(sets), vocabulary))


@given(positions())
def test_each_position_takes_the_shortest_form(made: tuple[int, Positions]) -> None:
    vocabulary, sets = made
    lengths = [min(len(left), vocabulary - len(left), -(-vocabulary // 32)) for left in sets]
    assert len(SamplingMask.of(vocabulary, sets).packed) == sum(4 + 4 * length for length in lengths)


@given(positions(), st.integers(-7, 7), st.integers(-7, 7))
def test_slices_and_sums_are_those_of_lists(made: tuple[int, Positions], first: int, last: int) -> None:
    vocabulary, sets = made
    mask = SamplingMask.of(vocabulary, sets)
    assert mask[first:last] == SamplingMask.of(vocabulary, sets[first:last])
    assert mask[:first] + mask[last:] == SamplingMask.of(vocabulary, sets[:first] + sets[last:])
    assert len(mask[first:]) == len(sets[first:])


@pytest.mark.parametrize(
    ("count", "vocabulary", "form"),
    [
        (0, 100, (MaskForm.KEPT, 0)),
        (4, 100, (MaskForm.KEPT, 4)),
        (5, 100, (MaskForm.BITS, 4)),
        (50, 100, (MaskForm.BITS, 4)),
        (96, 100, (MaskForm.EXCLUDED, 4)),
        (100, 100, (MaskForm.EXCLUDED, 0)),
        (1, 2, (MaskForm.KEPT, 1)),
    ],
)
def test_forms(count: int, vocabulary: int, form: tuple[MaskForm, int]) -> None:
    assert form_of(count, vocabulary) == form


@pytest.mark.parametrize(
    "sent",
    [
        copy.copy,
        copy.deepcopy,
        lambda mask: pickle.loads(pickle.dumps(mask)),
        lambda mask: msgspec.msgpack.decode(msgspec.msgpack.encode(mask), type=SamplingMask),
    ],
    ids=["copy", "deepcopy", "pickle", "wire"],
)
def test_it_can_be_sent(sent: Callable[[SamplingMask], SamplingMask]) -> None:
    mask = SamplingMask.of(70, [[3], range(70), range(35)])
    assert len(mask) == 3  # an index that was made is not sent
    arrived = sent(mask)
    assert arrived == mask
    assert arrived.ids(-1) == list(range(35))
    assert hash(arrived) == hash(mask)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="the id 9 is outside"):
        SamplingMask.of(9, [[9]])
    with pytest.raises(ValueError, match="11 ids are left of a vocabulary of 9"):
        form_of(11, 9)
    with pytest.raises(ValueError, match="cannot join"):
        _ = SamplingMask(9) + SamplingMask(8)
    with pytest.raises(ValueError, match="no packed positions"):
        len(SamplingMask(9, (10).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="do not end with a position"):
        len(SamplingMask(9, (2).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="consecutive"):
        _ = SamplingMask.of(9, [[1], [2], [3]])[::2]
    with pytest.raises(TypeError, match="slice"):
        _ = SamplingMask.of(9, [[1]])[0]  # type: ignore[index]
    with pytest.raises(IndexError):
        SamplingMask.of(9, [[1]]).ids(1)


def test_its_repr_is_short() -> None:
    assert repr(SamplingMask.of(9, [[1], [2]])) == "SamplingMask(vocab_size=9, positions=2, nbytes=16)"


# On the engine's page ------------------------------------------------------------------------------------------------


def samples(*, asks: bool = True) -> Samples:
    params = SamplingParams(return_sampling_mask=asks)
    request = GenerateRequest("one", [1], params, 8, (), LogprobsMode.RAW)
    return Samples(request, 0, lambda _: None, vocab_size=9)


def result(mask: SamplingMask | None, *, cut: int | None = None) -> GenerateResult:
    text = None if cut is None else MatchedText("", cut, matched="x")
    spans = [VersionSpan("a", 0, 3)]
    return GenerateResult([3, 4, 5], FinishReason.LENGTH, spans, sampling_mask=mask, matched_text=text)


def tokenizer(ids: list[int], *, skip_special_tokens: bool = True) -> str:
    return "x" * len(ids)


MASK = SamplingMask.of(9, [[3], [4, 5], [5]])


def test_a_stop_cuts_the_mask() -> None:
    whole = to_completion(samples().sample(0), result(MASK), tokenizer)  # type: ignore[arg-type]
    assert whole.sampling_mask == MASK
    cut = to_completion(samples().sample(0), result(MASK, cut=2), tokenizer)  # type: ignore[arg-type]
    assert cut.sampling_mask == MASK[:2]


def test_nobody_gets_a_mask_unasked() -> None:
    plain = to_completion(samples(asks=False).sample(0), result(MASK), tokenizer)  # type: ignore[arg-type]
    assert plain.sampling_mask is None


def test_a_request_aborted_in_the_queue_has_an_empty_mask() -> None:
    sample = samples().sample(0)
    aborted = to_completion(sample, aborted_before_start(sample), tokenizer)  # type: ignore[arg-type]
    assert aborted.sampling_mask == SamplingMask(9)


@pytest.mark.parametrize(
    ("mask", "says"),
    [(None, "3 ids and a sampling mask of 0"), (MASK[:2], "of 2"), (SamplingMask(9, b"abc"), "cannot be read")],
)
def test_a_mask_that_does_not_fit_is_the_engines_fault(mask: SamplingMask | None, says: str) -> None:
    with pytest.raises(EngineInternalError, match=says):
        to_completion(samples().sample(0), result(mask), tokenizer)  # type: ignore[arg-type]
