"""A completion's text is decoded when it is first read."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest

from drivetrain import SamplingParams
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.engine.completions import to_completion
from drivetrain.engine.samples import Samples
from drivetrain.types.outputs import Completion, FinishReason, VersionSpan, make_text_later
from drivetrain.types.sampling import LogprobsMode


def completion(text: str = "") -> Completion:
    return Completion("r-0", 0, 0, [1, 2], [3, 4], text, FinishReason.LENGTH)


def test_it_is_made_once() -> None:
    made: list[str] = []

    def make() -> str:
        made.append("now")
        return "words"

    later = make_text_later(completion(), make)
    assert not made
    assert (later.text, later.text) == ("words", "words")
    assert made == ["now"]


@pytest.mark.parametrize(
    "look",
    [
        lambda later: later,
        copy.copy,
        copy.deepcopy,
        lambda later: pickle.loads(pickle.dumps(later)),
        lambda later: dataclasses.replace(later, request_id="r-0"),
        lambda later: Completion(**{field.name: getattr(later, field.name) for field in dataclasses.fields(later)}),
    ],
    ids=["equal", "copy", "deepcopy", "pickle", "replace", "fields"],
)
def test_it_is_as_if_it_had_always_been_there(look: Callable[[Completion], Completion]) -> None:
    later = make_text_later(completion(), lambda: "words")
    assert look(later) == completion("words")
    assert look(make_text_later(completion(), lambda: "words")).text == "words"
    assert repr(make_text_later(completion(), lambda: "words")) == repr(completion("words"))


def test_other_attributes_are_missed_as_ever() -> None:
    with pytest.raises(AttributeError, match="'Completion' object has no attribute 'tetx'"):
        _ = completion().tetx  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion().text = "other"  # type: ignore[misc]


@pytest.mark.parametrize("matched_stop", [None, 9])
def test_a_result_is_decoded_when_it_is_read(matched_stop: int | None) -> None:
    asked: list[list[int]] = []

    class Decoder:
        def __call__(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            asked.append(token_ids)
            return " ".join(map(str, token_ids))

    request = GenerateRequest("r-0", [1], SamplingParams(), 3, (9,), LogprobsMode.RAW)
    ids = [7, 8, 9]
    result = GenerateResult(ids, FinishReason.LENGTH, [VersionSpan("0", 0, 3)], matched_stop=matched_stop)
    made = to_completion(Samples(request, 0, lambda index: None).sample(0), result, Decoder())  # type: ignore[arg-type]
    assert not asked
    ids.append(10)  # the completion has its own copy of the list
    assert made.text == ("7 8 9" if matched_stop is None else "7 8")
    assert len(asked) == 1
