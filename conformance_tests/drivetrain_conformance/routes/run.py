"""Run route cases on a server and report how each ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec

from drivetrain_conformance.harness.report_files import CaseEntries, CaseEntry, read_json, today
from drivetrain_conformance.harness.verdict import Judgement, Verdict, describe
from drivetrain_conformance.routes.case import RouteCase
from drivetrain_conformance.routes.server_under_test import CannotRun, RouteRefused, Target

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class RouteReport(CaseEntries):
    """One run of route cases."""

    format: int
    url: str
    dialect: str
    model: str
    date: str
    seconds: float
    cases: list[CaseEntry]
    name: str = ""
    """Name of the server on pages."""

    @property
    def title(self) -> str:
        """Name or address, and dialect."""
        return f"{self.name or self.url}, {self.dialect}"

    def exceptions(self) -> list[str]:
        """Every case that did not pass, with its verdict and the first line of its message."""
        return [
            f"`{entry.case}`: {entry.verdict.value.replace('_', ' ')}: `{(entry.message.splitlines() or [''])[0]}`"
            for entry in self.cases
            if entry.verdict is not Verdict.PASSED
        ]


async def run_routes(target: Target, cases: Sequence[RouteCase]) -> AsyncIterator[CaseEntry]:
    """Run cases one after another; yield how each ended."""
    for case in cases:
        begun = time.monotonic()
        judged = await _judged(target, case)
        yield CaseEntry(case.id, judged.verdict, case.summary, round(time.monotonic() - begun, 2), judged.message)


async def _judged(target: Target, case: RouteCase) -> Judgement:
    try:
        await case.body(target)
    except RouteRefused as refused:
        return Judgement(Verdict.REFUSED, str(refused))
    except CannotRun as unmet:
        return Judgement(Verdict.NOT_RUN, str(unmet))
    except (AssertionError, httpx.HTTPError) as error:
        return Judgement(Verdict.FAILED, describe(error))
    return Judgement(Verdict.PASSED)


def route_report(url: str, target: Target, entries: Sequence[CaseEntry], name: str = "") -> RouteReport:
    """Put a run into a report."""
    return RouteReport(
        format=FORMAT,
        url=url,
        dialect=target.dialect.value,
        model=target.model,
        date=today(),
        seconds=round(sum(entry.seconds for entry in entries), 1),
        cases=list(entries),
        name=name,
    )


def is_route_report(path: Path) -> bool:
    """Return whether a file holds a report of routes, and not one of a backend."""
    try:
        return isinstance(found := msgspec.json.decode(path.read_bytes()), dict) and "dialect" in found
    except (OSError, msgspec.MsgspecError):
        return False


def read_route_report(path: Path) -> RouteReport:
    """Read a report of 'drivetrain conformance --url'.

    Raises:
        InvalidConfig: the file cannot be read, holds no report of routes, or one in another format.
    """
    return read_json(path, RouteReport, "report of routes", "conformance --url … --report", FORMAT)
