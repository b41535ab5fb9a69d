"""Reports, and the matrix that is made from them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Capability, InvalidConfig
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.reports.matrix import differences, render_html, render_markdown
from drivetrain_conformance.reports.report import (
    CapabilityEntry,
    CaseEntry,
    Hardware,
    Report,
    combine_reports,
    read_report,
    write_report,
)


def entry(case: str, verdict: Verdict, needs: list[str] | None = None, message: str = "") -> CaseEntry:
    return CaseEntry(case, verdict, needs or [], "It holds.", 0.1, message)


def report(*cases: CaseEntry, capabilities: list[CapabilityEntry] | None = None, complete: bool = True) -> Report:
    return Report(
        format=1,
        backend="made-up",
        isolation="inline",
        model="qwen2",
        profile="ci",
        seed=0,
        date="2026-01-01",
        seconds=1.0,
        complete=complete,
        versions={"made-up": "1.0"},
        hardware=Hardware("a <fast> CPU", 2, 24.0, []),
        capabilities=capabilities or [],
        cases=list(cases),
    )


def mark(markdown: str, capability: str) -> str:
    found = re.search(rf"^\| `{capability}` \| (.) \|", markdown, flags=re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    made = report(entry("stop/x", Verdict.KNOWN_FAILURE, ["seed"], "upstream"))
    write_report(made, tmp_path / "deep" / "r.json")
    assert read_report(tmp_path / "deep" / "r.json") == made


def test_parts_of_a_run_become_one() -> None:
    claimed = [CapabilityEntry("seed", True, Verdict.NOT_RUN, "")]
    parts = [
        report(entry("stop/a", Verdict.PASSED), entry("sampling/b", Verdict.REFUSED, ["seed"]), complete=False),
        report(entry("sampling/b", Verdict.PASSED, ["seed"]), capabilities=claimed, complete=False),
        report(entry("stop/a", Verdict.FAILED, message="once"), complete=False),
    ]
    whole = combine_reports(parts)
    assert {item.case: item.verdict for item in whole.cases} == {
        "stop/a": Verdict.FAILED,
        "sampling/b": Verdict.PASSED,
    }
    assert (whole.seconds, whole.complete) == (3.0, False)
    (seed,) = (item for item in whole.capabilities if item.capability == "seed")
    assert (seed.claimed, seed.verdict) == (True, Verdict.PASSED)


def test_all_parts_of_the_suite_are_a_whole() -> None:
    cases = [entry(case.id, Verdict.PASSED, [need.value for need in case.needs]) for case in all_cases()]
    claimed = [CapabilityEntry("seed", True, Verdict.NOT_RUN, "")]
    parts = [report(*cases[:9], complete=False), report(*cases[9:], capabilities=claimed, complete=False)]
    assert combine_reports(parts).complete
    assert combine_reports(parts).failures() == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"versions": {}}, {"isolation": "process"}, {"model": "llama"}])
def test_reports_of_different_runs_do_not_combine(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(change))} differs"):
        combine_reports([report(), dataclasses.replace(report(), **change)])


@pytest.mark.parametrize("content", ["{}", "no json", '{"format": 1}'])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(InvalidConfig, match=r"r\.json is no report"):
        read_report(tmp_path / "r.json")


def test_a_report_in_another_format_is_refused(tmp_path: Path) -> None:
    write_report(dataclasses.replace(report(), format=2), tmp_path / "r.json")
    with pytest.raises(InvalidConfig, match="in format 2; this version reads 1"):
        read_report(tmp_path / "r.json")


def test_each_verdict_has_a_mark_of_its_own_and_what_was_not_run_is_not_shown_as_supported() -> None:
    names = [capability.value for capability in list(Capability)[:5]]
    entries = [CapabilityEntry(name, True, verdict, "") for name, verdict in zip(names, Verdict, strict=True)]
    markdown = render_markdown([report(capabilities=entries)])
    marks = dict(zip(Verdict, (mark(markdown, name) for name in names), strict=True))
    assert len(set(marks.values())) == len(Verdict)
    absent = list(Capability)[5].value
    assert mark(markdown, absent) == marks[Verdict.NOT_RUN]


def test_the_matrix_names_what_failed_and_what_was_not_run() -> None:
    made = report(entry("stop/x", Verdict.FAILED, message="late\nby one"), entry("sleep/y", Verdict.NOT_RUN, [], "gpu"))
    markdown, html = render_markdown([made]), render_html([made])
    assert "- ✗ stop/x: late" in markdown
    assert "- ? sleep/y: gpu" in markdown
    assert "late\nby one" in html
    assert "a &lt;fast&gt; CPU" in html


def test_a_claim_that_was_not_seen_to_work_is_a_failure_of_a_whole_run_only() -> None:
    unseen = [CapabilityEntry("seed", True, Verdict.FAILED, "claimed, but no case of it passed")]
    assert report(capabilities=unseen).failures() == ["seed: claimed, but no case of it passed"]
    assert report(capabilities=unseen, complete=False).failures() == []
    once = report(entry("sampling/s", Verdict.FAILED, ["seed"], "wrong"), capabilities=unseen)
    assert once.failures() == ["sampling/s: wrong"]


def test_a_kept_report_is_current_only_while_verdicts_cases_and_claims_are_the_same() -> None:
    kept = report(entry("stop/x", Verdict.PASSED), capabilities=[CapabilityEntry("seed", True, Verdict.PASSED, "")])
    slower = dataclasses.replace(kept, seconds=9.0, date="2026-02-02")
    assert differences(slower, kept) == []
    changed = dataclasses.replace(kept, cases=[entry("stop/x", Verdict.FAILED), entry("stop/z", Verdict.PASSED)])
    assert differences(changed, kept) == [
        "stop/x: passed in the kept report, failed now",
        "stop/z: absent in the kept report, passed now",
    ]
    less = dataclasses.replace(kept, capabilities=[CapabilityEntry("seed", False, Verdict.REFUSED, "")])
    assert differences(less, kept) == ["seed: claimed=True in the kept report, claimed=False now"]
