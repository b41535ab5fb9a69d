"""The verdict law, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import Capability, UnsupportedCapability
from drivetrain_conformance.harness.verdict import KnownFailure, Verdict, apply_known_failures, describe, judge

TOP_K, SEED, LORA = Capability.TOP_K, Capability.SEED, Capability.LORA


def refusal(capability: Capability) -> UnsupportedCapability:
    return UnsupportedCapability("not here", capability=capability.value)


@pytest.mark.parametrize(
    ("missing", "error", "verdict", "says"),
    [
        ((), None, Verdict.PASSED, ""),
        ((), AssertionError("wrong ids"), Verdict.FAILED, "AssertionError: wrong ids"),
        ((), refusal(TOP_K), Verdict.FAILED, "claims top_k, and refuses it"),
        ((), refusal(LORA), Verdict.FAILED, "refused for lora, which this case does not need"),
        ((TOP_K,), None, Verdict.FAILED, "works though unclaimed: top_k"),
        ((TOP_K, SEED), None, Verdict.FAILED, "works though unclaimed: seed, top_k"),
        ((TOP_K,), refusal(TOP_K), Verdict.REFUSED, "not here"),
        ((TOP_K, SEED), refusal(SEED), Verdict.REFUSED, "not here"),
        ((TOP_K,), refusal(SEED), Verdict.FAILED, "claims seed, and refuses it"),
        ((TOP_K,), refusal(LORA), Verdict.FAILED, "refused for lora"),
        ((TOP_K,), AssertionError("wrong ids"), Verdict.FAILED, "expected UnsupportedCapability for one of top_k"),
        ((TOP_K,), NotImplementedError("no"), Verdict.FAILED, "got NotImplementedError: no"),
        ((TOP_K,), UnsupportedCapability("vague"), Verdict.FAILED, "refused for no capability"),
    ],
)
def test_each_way_to_end_has_one_verdict(
    missing: tuple[Capability, ...], error: Exception | None, verdict: Verdict, says: str
) -> None:
    judged = judge({TOP_K, SEED}, missing, error)
    assert judged.verdict is verdict
    assert says in judged.message


KNOWN = KnownFailure("stop/x", "an upstream bug", "https://example.org/1", "AssertionError", "one token late")


@pytest.mark.parametrize(
    ("error", "verdict", "says"),
    [
        (AssertionError("stops one token late"), Verdict.KNOWN_FAILURE, "an upstream bug"),
        (AssertionError("stops two tokens late"), Verdict.FAILED, "failed otherwise"),
        (ValueError("one token late"), Verdict.FAILED, "failed otherwise"),
        (None, Verdict.FAILED, "take it off the list"),
    ],
)
def test_a_known_failure_fails_exactly_as_listed(error: Exception | None, verdict: Verdict, says: str) -> None:
    judged = apply_known_failures("stop/x", judge((), (), error), error, [KNOWN])
    assert judged.verdict is verdict
    assert says in judged.message


def test_a_known_failure_of_another_case_changes_nothing() -> None:
    error = AssertionError("one token late")
    assert apply_known_failures("stop/y", judge((), (), error), error, [KNOWN]).verdict is Verdict.FAILED


def test_an_assertion_without_a_message_is_described_by_its_source_and_values(tmp_path: Path) -> None:
    source = tmp_path / "body.py"
    source.write_text("def body(ids, seen):\n    assert len(ids) == [\n        seen.value,\n    ]\n")
    namespace: dict[str, Callable[[list[int], Verdict], None]] = {}
    exec(compile(source.read_text(), source, "exec"), namespace)
    with pytest.raises(AssertionError) as raised:
        namespace["body"]([1, 2], Verdict.FAILED)
    text, _, values = describe(raised.value).partition("  # ")
    assert text == "AssertionError: assert len(ids) == [ seen.value, ]"
    assert "ids = [1, 2]" in values
    assert "seen.value = 'failed'" in values


def test_the_assertion_behind_an_error_is_described_too() -> None:
    error = ValueError("the update failed")
    error.__cause__ = AssertionError("the version was published too soon")
    assert describe(error) == "ValueError: the update failed\nfrom AssertionError: the version was published too soon"
