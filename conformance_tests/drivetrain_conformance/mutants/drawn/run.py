"""Run the suite on wrong backends that are drawn, and tell which share of them it catches."""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from tempfile import NamedTemporaryFile
from typing import Final

from rich.text import Text

from drivetrain.backend.base import Backend
from drivetrain.cli.output import out
from drivetrain.errors import InvalidConfig, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.case import Case
from drivetrain_conformance.harness.progress_bar import progress_bar
from drivetrain_conformance.harness.runner import Runner
from drivetrain_conformance.harness.suite import suite_of
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.mutants.drawn.draw import Drawing
from drivetrain_conformance.mutants.drawn.host import hosts_of
from drivetrain_conformance.mutants.drawn.mutant import Drawn
from drivetrain_conformance.mutants.drawn.watched import Probe, probed_backend, wrong_backend
from drivetrain_conformance.mutants.registry import Mutant
from drivetrain_conformance.mutants.run import MUTANT_PROFILE, suite_of_mutant

_SECONDS: Final = 90.0
"""Timeout of one case: a wrong backend may hang."""


@dataclass(frozen=True, slots=True)
class DrawnResult:
    """Result of running the suite on one drawn mutant."""

    name: str
    cases: tuple[str, ...]
    """Cases that reach it, shortest first; empty if none does."""
    caught_by: str = ""
    message: str = ""

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        return "caught" if self.caught_by else "MISSED" if self.cases else "not reached"


def run_drawn_mutants(backend: str, cases: Sequence[Case], *, count: int, seed: int, jobs: int = 1) -> bool:
    """Draw mutants, run the suite on each, in ``jobs`` processes, and show which are caught.

    A mutant that no case reaches is a hole of the suite as well.

    Returns:
        True if all were caught.
    """
    drawing = Drawing(backend, seed, count, claimable(backend, cases))
    pool = drawing.mutants()
    seconds: dict[str, float] = {}
    reaching: dict[str, list[str]] = {one.name: [] for one in pool}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_quietly) as processes:
        size = -(-len(cases) // (4 * jobs))
        parts = [[case.id for case in cases[at : at + size]] for at in range(0, len(cases), size)]
        with progress_bar(backend, len(cases)) as advance:
            probes = {processes.submit(_reached, drawing, part): part for part in parts}
            for probed in as_completed(probes):
                advance("reached", len(probes[probed]))
                for case, took, names in probed.result():
                    seconds[case] = took
                    for name in names:
                        reaching[name].append(case)
        with progress_bar(backend, len(pool)) as advance:
            tries = [
                processes.submit(_try, drawing, one.name, sorted(reaching[one.name], key=seconds.__getitem__))
                for one in pool
            ]
            results = []
            for tried in as_completed(tries):
                results.append(result := tried.result())
                advance(result.name)
                style = "" if result.caught_by else "red"
                by = result.caught_by or ", ".join([f"reached by {len(result.cases)}", *result.cases[:5]])
                out.print(Text(f"{result.verdict:12} {result.name} [{by}]"), style=style, soft_wrap=True)
    counts = Counter(result.verdict for result in results)
    out.print(
        f"{counts['caught']} of {len(results)} caught, {counts['MISSED']} missed, {counts['not reached']} not reached"
    )
    return counts["caught"] == len(results)


def _quietly() -> None:
    logging.getLogger("drivetrain").setLevel(logging.CRITICAL)  # cases provoke errors


def _reached(drawing: Drawing, ids: Sequence[str]) -> list[tuple[str, float, list[str]]]:
    found = reached(drawing.backend, drawing.mutants(), _cases(ids), drawing.seed, drawing)
    return [(case.id, seconds, names) for case, seconds, names in found]


def _try(drawing: Drawing, name: str, ids: Sequence[str]) -> DrawnResult:
    (mutant,) = (one for one in drawing.mutants() if one.name == name)
    return try_drawn(drawing.backend, mutant, _cases(ids), drawing.seed, drawing)


def _cases(ids: Sequence[str]) -> list[Case]:
    cases = {case.id: case for case in all_cases()}
    return [cases[id] for id in ids]


def claimable(backend: str, cases: Sequence[Case]) -> frozenset[Capability]:
    """Return the capabilities that a backend claims on this machine, with the text model and a case's configuration."""
    suite, claimed = suite_of(backend)(), set[Capability]()
    with closing(Models(layers=suite.layers)) as models:
        model = str(models.path(ModelKind.TEXT))
        for fields in [*suite.elsewhere, {}, *(case.config for case in cases)]:
            with suppress(InvalidConfig, UnsupportedCapability):
                claimed |= suite.claims({"model": model, **fields})
    return frozenset(claimed)


def reached(
    backend: str, pool: Sequence[Drawn], cases: Sequence[Case], seed: int = 0, drawing: Drawing | None = None
) -> Iterator[tuple[Case, float, list[str]]]:
    """Run cases on the correct backend; yield each that passes, its seconds, and the mutants that show in it.

    A case that fails there judges no mutant, and is told of. Host processes of a ``drawing`` note mutants as well.
    """
    probe = Probe(pool)
    with ExitStack() as stack:
        seen = stack.enter_context(NamedTemporaryFile(mode="r", prefix="drivetrain-seen-", encoding="utf-8"))
        if drawing is not None:
            stack.enter_context(hosts_of(drawing, seen=seen.name))
        runner = stack.enter_context(_runner(backend, lambda correct: probed_backend(correct, probe), seed))
        for case in cases:
            probe.begin(case.id)
            result = runner.execute(case)
            of_hosts = set(seen.read().splitlines())
            if result.verdict is Verdict.PASSED:
                unseen = {one.name for one in probe.unseen} - of_hosts
                yield case, result.seconds, [one.name for one in pool if one.name not in unseen]
            elif result.verdict is Verdict.FAILED:
                message = f"not counted: {case.id} fails on the correct backend: {result.judgement.message}"
                out.print(Text(message), soft_wrap=True)


def try_drawn(
    backend: str, mutant: Drawn, cases: Sequence[Case], seed: int = 0, drawing: Drawing | None = None
) -> DrawnResult:
    """Run cases on a wrong backend until one fails; one of a ``drawing`` is wrong in host processes as well."""
    ids = tuple(case.id for case in cases)
    with (
        nullcontext() if drawing is None else hosts_of(drawing, mutant=mutant.name),
        _runner(backend, lambda correct: wrong_backend(correct, mutant), seed) as runner,
    ):
        for case in cases:
            result = runner.execute(case)
            if result.verdict is Verdict.FAILED:
                return DrawnResult(mutant.name, ids, case.id, result.judgement.message)
    return DrawnResult(mutant.name, ids)


def _runner(backend: str, spoil: Callable[[type[Backend]], type[Backend]], seed: int) -> Runner:
    profile = replace(MUTANT_PROFILE, case_timeout=_SECONDS)
    made = Mutant("drawn", "", "", (), spoil_backend=spoil)
    return Runner(suite_of_mutant(backend, made)(), profile=profile, seed=seed)
