"""Reports, and the matrix that is made from them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from drivetrain import Capability, InvalidConfig
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.report_files import CaseEntry, write_json
from drivetrain_conformance.harness.run_profile import LEFT_OUT
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.reports.matrix import differences, render_markdown, render_svg, sections
from drivetrain_conformance.reports.report import (
    CapabilityEntry,
    Hardware,
    Report,
    combine_reports,
    read_report,
)


def entry(case: str, verdict: Verdict, needs: list[str] | None = None, message: str = "") -> CaseEntry:
    return CaseEntry(case, verdict, "It holds.", 0.1, message, needs or [])


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
    found = re.search(rf"^\| `{capability}` \| (.+?) \|", markdown, flags=re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    made = report(entry("stop/x", Verdict.KNOWN_FAILURE, ["seed"], "upstream"))
    write_json(made, tmp_path / "deep" / "r.json")
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
    write_json(dataclasses.replace(report(), format=2), tmp_path / "r.json")
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
    markdown = render_markdown([made])
    assert "- failed: stop/x: late" in markdown
    assert "- not run: sleep/y: gpu" in markdown


def on(gpus: list[str], *, seed: Verdict | None, backend: str = "made-up") -> Report:
    """A report whose machine has these GPUs, and in which one capability ended so; None: it is older than that."""
    entries = [] if seed is None else [CapabilityEntry("seed", seed is Verdict.PASSED, seed, "")]
    hardware = dataclasses.replace(report().hardware, gpus=gpus)
    return dataclasses.replace(report(capabilities=entries), hardware=hardware, backend=backend)


@pytest.mark.parametrize(
    ("cpu", "gpu", "says"),
    [
        (Verdict.PASSED, Verdict.PASSED, "yes"),
        (Verdict.PASSED, Verdict.REFUSED, "CPU only"),
        (Verdict.REFUSED, Verdict.PASSED, "GPU only"),
        (Verdict.PASSED, None, "CPU; GPU not run"),
        (Verdict.REFUSED, None, "no; GPU not run"),
        (Verdict.REFUSED, Verdict.REFUSED, "no"),
        (None, None, "not run"),
        (Verdict.PASSED, Verdict.FAILED, "fails on GPU"),
        (Verdict.KNOWN_FAILURE, Verdict.KNOWN_FAILURE, "known to fail on CPU and GPU"),
    ],
)
def test_a_cell_says_where_a_capability_was_seen_to_work(cpu: Verdict | None, gpu: Verdict | None, says: str) -> None:
    assert mark(render_markdown([on([], seed=cpu), on(["H200"], seed=gpu)]), "seed") == says


def test_what_works_in_one_isolation_works_and_what_fails_in_one_fails() -> None:
    assert mark(render_markdown([on([], seed=Verdict.REFUSED), on([], seed=Verdict.PASSED)]), "seed") == "yes"
    assert mark(render_markdown([on([], seed=Verdict.FAILED), on([], seed=Verdict.PASSED)]), "seed") == "fails on CPU"


def test_every_capability_is_shown_once_under_a_topic() -> None:
    shown = [row.name for section in sections([report()]) for row in section.rows]
    assert sorted(shown) == sorted(capability.value for capability in Capability)
    assert "Other" not in [section.title for section in sections([report()])]


def test_the_picture_has_a_row_for_each_backend_and_a_square_for_each_capability() -> None:
    svg = render_svg([on([], seed=Verdict.PASSED), on([], seed=Verdict.REFUSED, backend="a<b")])
    titles = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")
    told = [title.text for title in titles]
    assert "made-up, seed: yes" in told
    assert "a<b, seed: no" in told
    assert len(told) == 1 + 2 * len(Capability)


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
    first = CapabilityEntry("abort", True, Verdict.PASSED, "")
    more = dataclasses.replace(kept, capabilities=[first, *kept.capabilities])
    assert differences(more, kept) == ["abort: absent in the kept report, claimed=True now"]


def test_slow_cases_that_a_quick_run_leaves_out_make_no_kept_report_stale() -> None:
    kept = report(entry("stop/x", Verdict.PASSED), entry("stop/y", Verdict.PASSED))
    quick = report(entry("stop/x", Verdict.PASSED), entry("stop/y", Verdict.NOT_RUN, message=LEFT_OUT))
    assert differences(quick, kept) == []
    lacking = report(entry("stop/x", Verdict.PASSED), entry("stop/y", Verdict.NOT_RUN, message="no GPU"))
    assert differences(lacking, kept) == ["stop/y: passed in the kept report, not_run now"]
