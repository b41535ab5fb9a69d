"""Comparison of recorded answers of backends. No engine runs here: ``make parity`` records real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from drivetrain import InvalidConfig
from drivetrain_conformance.harness.report_files import write_json
from drivetrain_conformance.reports.parity import (
    FORMAT,
    Answer,
    Exchange,
    Recording,
    Refusal,
    compare,
    read_recording,
    record,
)
from drivetrain_conformance.reports.parity_page import columns_of, differences, render
from drivetrain_conformance.reports.report import Hardware

TOLERANCE = 1e-3


def answer(token_ids: tuple[int, ...] = (4, 5), **changes: object) -> Answer:
    made = Answer(
        token_ids=list(token_ids),
        text="ab",
        finish_reason="length",
        matched_stop=None,
        logprobs=[-0.5] * len(token_ids),
        top_logprobs=[[(token, -0.5)] for token in token_ids],
        prompt_logprobs=None,
        weight_versions=[("initial", 0, len(token_ids))],
    )
    return msgspec.structs.replace(made, **changes)


def exchange(*answers: Answer, name: str = "greedy", refusal: Refusal | None = None, drawn: bool = False) -> Exchange:
    return Exchange(name=name, drawn=drawn, answers=list(answers), refusal=refusal)


def refusal(**changes: object) -> Refusal:
    return msgspec.structs.replace(
        Refusal(error="InvalidRequest", field="n", message="n=0", unclaimed=False), **changes
    )


def recording(backend: str, *exchanges: Exchange, gpus: tuple[str, ...] = ()) -> Recording:
    return Recording(
        format=FORMAT,
        backend=backend,
        versions={backend: "1.2"},
        hardware=Hardware("cpu", 2, 4.0, list(gpus)),
        dtype="float32",
        date="2026-11-22",
        weights="0",
        exchanges=list(exchanges),
    )


def test_equal_answers_have_no_difference() -> None:
    found = compare(exchange(answer()), exchange(answer(logprobs=[-0.5, -0.5004])), TOLERANCE)
    assert (found.difference, found.tie) == ("", None)
    assert found.largest == pytest.approx(4e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": "ac"}, "text"),
        ({"finish_reason": "stop"}, "finish_reason"),
        ({"matched_stop": 5}, "matched_stop"),
        ({"weight_versions": [("initial", 0, 1), ("new", 1, 2)]}, "weight_versions"),
        ({"logprobs": [-0.5, -0.6]}, "logprobs differ by 0.1"),
        ({"logprobs": None}, "logprobs differ by inf"),
        ({"prompt_logprobs": [None, -1.0]}, "logprobs differ by inf"),
        ({"token_ids": [4, 6]}, "token 1 differs"),
        ({"token_ids": [4], "logprobs": [-0.5]}, "token 1 differs"),
    ],
)
def test_every_part_of_an_answer_is_compared(changes: dict[str, object], said: str) -> None:
    found = compare(exchange(answer()), exchange(answer(**changes)), TOLERANCE)  # type: ignore[arg-type]
    assert said in found.difference


def test_two_tokens_as_likely_are_a_tie_and_others_are_not() -> None:
    likely = [[(4, -0.5)], [(5, -0.5), (6, -0.5002)]]
    other = [[(4, -0.5)], [(6, -0.5), (5, -0.5002)]]
    tie = compare(
        exchange(answer(top_logprobs=likely)), exchange(answer((4, 6), top_logprobs=other, text="ac")), TOLERANCE
    )
    assert (tie.difference, tie.tie) == ("", 1)
    unlikely = [[(4, -0.5)], [(5, -0.5), (6, -0.7)]]
    found = compare(exchange(answer(top_logprobs=unlikely)), exchange(answer((4, 6), top_logprobs=other)), TOLERANCE)
    assert found.difference == "token 1 differs"


def test_tokens_that_were_drawn_may_part() -> None:
    assert compare(exchange(answer(), drawn=True), exchange(answer((4, 6)), drawn=True), TOLERANCE).tie == 1


@pytest.mark.parametrize("changes", [{"error": "EngineError"}, {"field": "m"}, {"message": "n"}])
def test_every_part_of_an_error_is_compared(changes: dict[str, object]) -> None:
    same = compare(exchange(refusal=refusal()), exchange(refusal=refusal()), TOLERANCE)
    assert same.difference == ""
    assert compare(exchange(refusal=refusal()), exchange(refusal=refusal(**changes)), TOLERANCE).difference


def test_one_that_refuses_and_one_that_does_not_differ_unless_it_is_unclaimed() -> None:
    assert "refuses" in compare(exchange(refusal=refusal()), exchange(answer()), TOLERANCE).difference
    assert compare(exchange(refusal=refusal(unclaimed=True)), exchange(answer()), TOLERANCE).unclaimed


def test_each_engine_is_compared_with_the_reference_of_its_own_machine() -> None:
    here = [recording("transformers", exchange(answer())), recording("vllm", exchange(answer((4, 6))))]
    there = [
        recording("transformers", exchange(answer((7, 8))), gpus=("H200",)),
        recording("vllm", exchange(answer((7, 8))), gpus=("H200",)),
    ]
    assert differences(columns_of([*here, *there])) == ["vllm 1.2, CPU, float32: greedy: token 1 differs"]
    page = render([*here, *there])
    assert "| request | vllm 1.2, CPU, float32 | vllm 1.2, H200, float32 |" in page
    assert "| greedy | **token 1 differs** | equal |" in page


def test_what_the_reference_does_not_claim_is_compared_between_the_others() -> None:
    unclaimed = exchange(refusal=refusal(unclaimed=True))
    recordings = [
        recording("transformers", unclaimed),
        recording("sglang", exchange(answer())),
        recording("vllm", exchange(answer((4, 6)))),
    ]
    assert differences(columns_of(recordings)) == ["vllm 1.2, CPU, float32: greedy: token 1 differs"]
    assert "what others are compared with" in render(recordings)


def test_without_the_reference_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(InvalidConfig, match="no recording of transformers"):
        columns_of([recording("vllm", exchange(answer()))])


def test_a_known_cause_is_named_and_is_no_difference() -> None:
    name = "refused: a grammar that is none"
    recordings = [
        recording("transformers", exchange(name=name, refusal=refusal())),
        recording("vllm", exchange(name=name, refusal=refusal(message="another"))),
    ]
    assert differences(columns_of(recordings)) == []
    page = render(recordings)
    assert "differs: see below" in page
    assert f"- *{name}*" in page


def test_a_backend_agrees_with_itself(tmp_path: Path) -> None:
    recorded = asyncio.run(record("transformers", "float32", {"isolation": "inline"}))
    write_json(recorded, tmp_path / "it.json")
    again = read_recording(tmp_path / "it.json")
    assert again == recorded
    assert len(recorded.exchanges) > 40
    for one in recorded.exchanges:
        found = compare(one, one, TOLERANCE)
        assert found.difference == ""
    stopped = {
        one.name: one.answers[0].finish_reason for one in recorded.exchanges if "stop" in one.name and one.answers
    }
    assert stopped
    assert set(stopped.values()) == {"stop"}, "these requests no longer stop where they should"


def test_a_file_that_is_no_recording_says_so(tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="is no recording"):
        read_recording(tmp_path / "it.json")


def test_a_recording_in_another_format_says_so(tmp_path: Path) -> None:
    write_json(msgspec.structs.replace(recording("transformers"), format=2), tmp_path / "it.json")
    with pytest.raises(InvalidConfig, match="in format 2; this version reads 1"):
        read_recording(tmp_path / "it.json")
