"""Several reports side by side: the parity matrix, as Markdown and as a page of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from drivetrain.types.capability import Capability
from drivetrain_conformance.cases import GROUPS
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.reports.report import Report

SYMBOLS: Final = {
    Verdict.PASSED: "✓",
    Verdict.REFUSED: "○",
    Verdict.FAILED: "✗",
    Verdict.KNOWN_FAILURE: "!",
    Verdict.NOT_RUN: "?",
}
MEANINGS: Final = {
    Verdict.PASSED: "claimed, and seen to work",
    Verdict.REFUSED: "not claimed, and seen to refuse",
    Verdict.FAILED: "failed",
    Verdict.KNOWN_FAILURE: "known to fail, for the reason listed",
    Verdict.NOT_RUN: "not run: nothing is known",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One capability of one report."""

    verdict: Verdict
    note: str

    @property
    def symbol(self) -> str:
        """One character."""
        return SYMBOLS[self.verdict]


@dataclass(frozen=True, slots=True)
class Row:
    """One capability, or one group, across the reports."""

    name: str
    meaning: str
    cells: list[Cell]


def render_markdown(reports: Sequence[Report]) -> str:
    """The matrix as Markdown."""
    return _render("matrix.md.j2", reports)


def render_html(reports: Sequence[Report]) -> str:
    """The matrix as one page of HTML that needs nothing else."""
    return _render("matrix.html.j2", reports)


def differences(fresh: Report, kept: Report) -> list[str]:
    """In which verdicts a fresh report differs from the one that is kept; empty if the kept one is current."""
    now = {entry.case: entry.verdict for entry in fresh.cases}
    then = {entry.case: entry.verdict for entry in kept.cases}
    found = [
        f"{case}: {_shown(then.get(case))} in the kept report, {_shown(now.get(case))} now"
        for case in sorted(now.keys() | then.keys())
        if now.get(case) is not then.get(case)
    ]
    found += [
        f"{was.capability}: claimed={was.claimed} in the kept report, claimed={entry.claimed} now"
        for was, entry in zip(kept.capabilities, fresh.capabilities, strict=False)
        if (was.capability, was.claimed) != (entry.capability, entry.claimed)
    ]
    return found


def _shown(verdict: Verdict | None) -> str:
    return verdict.value if verdict else "absent"


def _render(template: str, reports: Sequence[Report]) -> str:
    environment = Environment(
        loader=PackageLoader("drivetrain_conformance", "templates"),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(
        reports=reports,
        capabilities=[_capability_row(capability, reports) for capability in Capability],
        groups=[_group_row(group, reports) for group in GROUPS],
        verdicts=[(SYMBOLS[verdict], verdict.value, MEANINGS[verdict]) for verdict in Verdict],
    )


def _capability_row(capability: Capability, reports: Sequence[Report]) -> Row:
    return Row(capability.value, capability.meaning, [_capability_cell(capability, report) for report in reports])


def _capability_cell(capability: Capability, report: Report) -> Cell:
    for entry in report.capabilities:
        if entry.capability == capability.value:
            return Cell(entry.verdict, entry.message)
    return Cell(Verdict.NOT_RUN, "this report is older than the capability")


def _group_row(group: str, reports: Sequence[Report]) -> Row:
    return Row(group, "", [_group_cell(group, report) for report in reports])


def _group_cell(group: str, report: Report) -> Cell:
    verdicts = [entry.verdict for entry in report.cases if entry.case.startswith(f"{group}/")]
    worst = next(
        (
            verdict
            for verdict in (Verdict.FAILED, Verdict.KNOWN_FAILURE, Verdict.NOT_RUN, Verdict.PASSED, Verdict.REFUSED)
            if verdict in verdicts
        ),
        Verdict.NOT_RUN,
    )
    counted = [f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in verdicts]
    return Cell(worst, ", ".join(counted) or "no case")
