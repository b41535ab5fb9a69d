"""The coverage page is true: what it names exists, each row is answered, and its counts are right."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain_conformance.cases import all_cases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/coverage.md").read_text(encoding="utf-8")
TABLE_ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
CASE = re.compile(r"`([a-z_]+/\w+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
PROOF = r"`(?:[a-z_]+/\w+|tests/[\w/]+\.py::\w+)`"
COVERED = re.compile(rf"{PROOF}(, {PROOF}){{0,2}}( \([^()]+\))?")
HEAD = ("row", "what must hold", "our case")
ROWS = [row for row in TABLE_ROW.findall(PAGE) if row != HEAD]


def is_uncovered(answer: str) -> bool:
    return answer.startswith("not covered: ")


def test_every_case_on_the_page_exists() -> None:
    unknown = set(CASE.findall(PAGE)) - {case.id for case in all_cases()}
    assert not unknown


def test_every_test_on_the_page_exists() -> None:
    assert all(f"def {name}" in (ROOT / path).read_text(encoding="utf-8") for path, name in TEST.findall(PAGE))


def test_every_line_of_a_table_is_read_and_no_row_is_told_twice() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---")]
    assert len(lines) == len(ROWS) + PAGE.count("|---|---|---|")
    assert len({name for name, _, _ in ROWS}) == len(ROWS)


def test_every_row_has_a_case_or_a_reason() -> None:
    unanswered = [name for name, _, answer in ROWS if not is_uncovered(answer) and not COVERED.fullmatch(answer)]
    assert not unanswered


def test_the_counts_are_true() -> None:
    uncovered = sum(is_uncovered(answer) for _, _, answer in ROWS)
    assert f"{len(ROWS)} rows, {len(ROWS) - uncovered} covered, {uncovered} not." in PAGE
