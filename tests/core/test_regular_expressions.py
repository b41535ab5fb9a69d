"""Regular expressions are measured before they are compiled, as a short one can use up all memory."""

from __future__ import annotations

import pytest

from drivetrain import RegexGrammar, SamplingParams
from drivetrain.checks.limits import MOST_REPETITIONS
from drivetrain.checks.regular_expressions import compiled, repetitions

TOO_MANY = [
    "a{1000000000}",
    "a{1000000000,}",
    "a{" + "9" * 5000 + "}",
    "(?:a{1000}){1000}",
    "(?:[ab]{1000}){1000}",
    r"(?:(?:(?:\w{1000}){1000}){1000}){1000}",
    "(?:[)]a{1000}){1000}",
    "(?:[]()]a{1000}){1000}",
    r"(?:\)a{1000}){1000}",
    "(?:(?:a{1000}|b)c){1000}",
    "(?x)(?:a{1000}) {1000}",
    "(?ix-s)(?:a{1000})  {1000}",
    "(?:a{1000})(?#x){1000}",
    "(?V1)(?:[[(]]a{1000}){1000}",
]
FINE = [
    r"\d{4}-\d{2}-\d{2}",
    r"(?:\d{3}-){100}",
    r"\(a{10}\)[{(]{9}",
    "a{0,1000000000}",
    "(?:a{0,1000}){0,1000}",
    "a{1000}b{1000}",
    r"(?x) \d{4} - \d{2}",
    "a{b}{",
]


@pytest.mark.parametrize("pattern", TOO_MANY)
def test_counts_that_multiply_are_refused(pattern: str) -> None:
    assert repetitions(pattern) > MOST_REPETITIONS
    with pytest.raises(ValueError, match="once its counts are written out"):
        compiled(pattern)
    with pytest.raises(ValueError, match=r"(?s)stop_regex.*once its counts are written out"):
        SamplingParams(stop_regex=(pattern,) if len(pattern) < 4096 else (pattern[:4000] + "}",))
    with pytest.raises(ValueError, match="once its counts are written out"):
        RegexGrammar(regex=pattern)


@pytest.mark.parametrize("pattern", FINE)
def test_ordinary_counts_are_taken(pattern: str) -> None:
    assert compiled(pattern).pattern == pattern
    assert repetitions(pattern) <= MOST_REPETITIONS


def test_expressions_are_bounded_together() -> None:
    with pytest.raises(ValueError, match="its expressions have 20000 characters together; expected at most 16384"):
        SamplingParams(stop_regex=("a" * 4000,) * 5)
    with pytest.raises(ValueError, match="at most 16384 characters"):
        RegexGrammar(regex="a" * 20_000)
