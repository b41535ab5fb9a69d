"""Report of a run of the suite, as JSON: versions, hardware, seed, and a verdict for each case and capability."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from drivetrain.errors import InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.capability_results import CapabilityResult, CapabilityResults
from drivetrain_conformance.harness.report_files import CaseEntries, CaseEntry, read_json, today
from drivetrain_conformance.harness.runner import CaseResult, Runner
from drivetrain_conformance.harness.verdict import WORST_FIRST, Verdict

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine of a run."""

    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]

    def __str__(self) -> str:
        if not self.gpus:
            return f"CPU, {self.cores} cores"
        name, count = self.gpus[0], len(self.gpus)
        return name if count == 1 else f"{count} x {name}"


@dataclass(frozen=True, slots=True)
class CapabilityEntry:
    """One capability of a report."""

    capability: str
    claimed: bool
    verdict: Verdict
    message: str


@dataclass(frozen=True, slots=True)
class Report(CaseEntries):
    """One run of the suite."""

    format: int
    backend: str
    isolation: str
    model: str
    profile: str
    seed: int
    date: str
    seconds: float
    complete: bool
    """Every group was run."""
    versions: dict[str, str]
    hardware: Hardware
    capabilities: list[CapabilityEntry]
    cases: list[CaseEntry]

    @property
    def title(self) -> str:
        """Backend, where it ran, and on what."""
        return f"{self.backend}, {self.isolation}, {self.hardware}"

    def failures(self) -> list[str]:
        """Every failed case and, if the suite was run whole, every claim that was not seen to work."""
        found = CaseEntries.failures(self)
        if self.complete:
            found += [
                f"{entry.capability}: {entry.message}"
                for entry in self.capabilities
                if entry.verdict.is_failure and not self._has_failed_case(entry)
            ]
        return found

    def _has_failed_case(self, capability: CapabilityEntry) -> bool:
        return any(entry.verdict.is_failure and capability.capability in entry.needs for entry in self.cases)


def make_report(
    runner: Runner, results: Sequence[CaseResult], *, isolation: str, model: str, seconds: float, complete: bool
) -> Report:
    """Put a run into a report."""
    return Report(
        format=FORMAT,
        backend=runner.suite.backend,
        isolation=isolation,
        model=model,
        profile=runner.profile.name,
        seed=runner.seed,
        date=today(),
        seconds=round(seconds, 1),
        complete=complete,
        versions=dict(sorted(runner.versions.items())),
        hardware=hardware_here(),
        capabilities=[_capability(item) for item in runner.capability_results.conclude(complete=complete)],
        cases=[_case(result) for result in results],
    )


_OF_ONE_RUN: Final = ("backend", "isolation", "model", "profile", "seed", "versions", "machine")


def combine_reports(reports: Sequence[Report]) -> Report:
    """Put the reports of parts of the suite together, as if they were of one run.

    Raises:
        InvalidConfig: they are of different engines, machines, models or seeds.
    """
    first = reports[0]
    for report in reports[1:]:
        for name in _OF_ONE_RUN:
            one, other = str(_of_run(first, name)), str(_of_run(report, name))
            if one != other:
                raise InvalidConfig(f"{name} differs: {one} and {other}; only parts of one run combine")
    cases: dict[str, CaseEntry] = {}
    for entry in (entry for report in reports for entry in report.cases):
        kept = cases.get(entry.case)
        if kept is None or WORST_FIRST.index(entry.verdict) < WORST_FIRST.index(kept.verdict):
            cases[entry.case] = entry
    named = {capability.value: capability for capability in Capability}
    capability_results = CapabilityResults()
    for report in reports:
        capability_results.claim(named[entry.capability] for entry in report.capabilities if entry.claimed)
    for entry in cases.values():
        capability_results.record(entry.case, [named[name] for name in entry.needs], entry.verdict)
    order = {case.id: place for place, case in enumerate(all_cases())}
    complete = order.keys() <= cases.keys()
    return dataclasses.replace(
        first,
        date=max(report.date for report in reports),
        hardware=max((report.hardware for report in reports), key=lambda hardware: len(hardware.gpus)),
        seconds=round(sum(report.seconds for report in reports), 1),
        complete=complete,
        capabilities=[_capability(item) for item in capability_results.conclude(complete=complete)],
        cases=sorted(cases.values(), key=lambda entry: order.get(entry.case, len(order))),
    )


def _of_run(report: Report, name: str) -> object:
    if name != "machine":
        return getattr(report, name)
    # Parts may have seen fewer of its GPUs or cores.
    return report.hardware.cpu, sorted(set(report.hardware.gpus))


def read_report(path: Path) -> Report:
    """Read a report of 'drivetrain conformance'.

    Raises:
        InvalidConfig: the file cannot be read, holds no report, or one in another format.
    """
    return read_json(path, Report, "report", "conformance --report", FORMAT)


def _case(result: CaseResult) -> CaseEntry:
    case = result.case
    needs = sorted(capability.value for capability in case.needs)
    return CaseEntry(case.id, result.verdict, case.summary, round(result.seconds, 2), result.judgement.message, needs)


def _capability(item: CapabilityResult) -> CapabilityEntry:
    return CapabilityEntry(item.capability.value, item.claimed, item.verdict, item.message)


def hardware_here() -> Hardware:
    """This machine."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Hardware(
        cpu=_cpu_name(),
        cores=len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=gpus,
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
