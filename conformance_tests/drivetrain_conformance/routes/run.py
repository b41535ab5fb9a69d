"""Run route cases on a server and report how each ends."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec

from drivetrain_conformance.harness.verdict import Judgement, Verdict, describe
from drivetrain_conformance.routes.case import RouteCase
from drivetrain_conformance.routes.target import CannotRun, RouteRefused, Target

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One case of a report."""

    case: str
    verdict: Verdict
    summary: str
    seconds: float
    message: str


@dataclass(frozen=True, slots=True)
class RouteReport:
    """One run of route cases."""

    format: int
    url: str
    dialect: str
    model: str
    date: str
    seconds: float
    cases: list[RouteEntry]

    @property
    def title(self) -> str:
        """Address and dialect."""
        return f"{self.url}, {self.dialect}"

    def counts(self) -> dict[Verdict, int]:
        """How many cases ended how."""
        counted = Counter(entry.verdict for entry in self.cases)
        return {verdict: counted[verdict] for verdict in Verdict}

    def failures(self) -> list[str]:
        """Every failed case."""
        return [f"{entry.case}: {entry.message}" for entry in self.cases if entry.verdict.is_failure]

    def not_run(self) -> list[str]:
        """Every case that could not be brought about."""
        return [f"{entry.case}: {entry.message}" for entry in self.cases if entry.verdict is Verdict.NOT_RUN]


async def run_routes(target: Target, cases: Sequence[RouteCase]) -> AsyncIterator[RouteEntry]:
    """Run cases one after another; yield how each ended."""
    for case in cases:
        begun = time.monotonic()
        judged = await _judged(target, case)
        yield RouteEntry(case.id, judged.verdict, case.summary, round(time.monotonic() - begun, 2), judged.message)


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


def route_report(url: str, target: Target, entries: Sequence[RouteEntry]) -> RouteReport:
    """Put a run into a report."""
    return RouteReport(
        format=FORMAT,
        url=url,
        dialect=target.dialect.value,
        model=target.model,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds=round(sum(entry.seconds for entry in entries), 1),
        cases=list(entries),
    )


def write_route_report(report: RouteReport, path: Path) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
