"""The pytest class, used as a third party does: in a project of its own, run by pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.pytest_class import ConformanceTests

MODULE = """
from drivetrain_conformance import KnownFailure
from drivetrain_conformance.pytest_class import ConformanceTests

class TestTransformers(ConformanceTests):
    backend = "transformers"
    profile = "smoke"
    {extra}
"""


def run_pytest(folder: Path, extra: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_conformance.py").write_text(MODULE.format(extra=extra))
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=250,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def test_each_case_is_one_test(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "", "--collect-only")
    collected = {line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "::test_case[" in line}
    assert collected == {case.id for case in all_cases()}


@pytest.mark.slow
def test_chosen_cases_pass_and_the_claims_of_those_left_out_are_not_called_seen(tmp_path: Path) -> None:
    chosen = "at_most_max_new_tokens or samples_are_grouped_by_prompt or every_claim"
    done = run_pytest(tmp_path, "", "-k", chosen)
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "these cases did not run" in done.stdout


@pytest.mark.slow
def test_a_known_failure_that_passes_fails(tmp_path: Path) -> None:
    known = (
        'known_failures = (KnownFailure("generate/at_most_max_new_tokens", "a bug", "https://example.org", '
        '"AssertionError", "late"),)'
    )
    done = run_pytest(tmp_path, known, "-k", "at_most_max_new_tokens")
    assert done.returncode == 1
    assert "take it off the list" in done.stdout


@pytest.mark.parametrize(
    "body",
    [
        {"test_case": lambda self: None},
        {"test_every_claim_was_seen_to_work": lambda self: None},
        {"pytest_generate_tests": lambda self, metafunc: None},
        {"conformance_runner": None},
        {"test_mine": lambda self: None},
    ],
    ids=lambda body: next(iter(body)),
)
def test_no_test_can_be_overridden_or_taken_away(body: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="the same for every backend"):
        type("TestMine", (ConformanceTests,), {"backend": "transformers", **body})
