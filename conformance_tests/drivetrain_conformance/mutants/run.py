"""Runs the case meant for each mutant, on the working engine and on the spoiled one: it must pass, then fail."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rich.text import Text

from drivetrain.backend import registry
from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain.cli.output import out, print_json
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.types.config import Isolation
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.case import Case
from drivetrain_conformance.harness.progress_bar import progress_bar
from drivetrain_conformance.harness.run_profile import PROFILES, Profile
from drivetrain_conformance.harness.runner import CaseResult, Runner
from drivetrain_conformance.harness.suite import Suite, suite_of
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.mutants.ranks import spoiled_ranks
from drivetrain_conformance.mutants.registry import Mutant, registered_mutants

FAMILIES: Final = (
    *("claims", "fields", "combined", "configuration", "generation", "streams", "logprobs", "control", "weights"),
    *("adapters", "growth", "inputs", "tool_calls", "sampling_masks", "images", "media_bounds", "sounds"),
    *("scores", "pooled", "recurrent", "deterministic", "ranks"),
)
"""Modules of mutants."""
MUTANT_PROFILE: Final[Profile] = dataclasses.replace(PROFILES["ci"], name="mutants", samples=1024, cycles=20)
_PROFILE_OF_HANGS: Final[Profile] = dataclasses.replace(MUTANT_PROFILE, case_timeout=40.0)
"""For mutants that hang: the rest of their case takes two seconds."""


@dataclass(frozen=True, slots=True)
class MutantResult:
    """Result of running the suite on one mutant."""

    mutant: Mutant
    caught: bool
    message: str


def all_mutants() -> list[Mutant]:
    """Every mutant, family by family."""
    for family in FAMILIES:
        importlib.import_module(f"drivetrain_conformance.mutants.{family}")
    return list(registered_mutants().values())


def run_mutants(backend: str, cases: Sequence[Case], fields: Mapping[str, object], *, as_json: bool) -> bool:
    """Try every mutant of ``backend`` that one of ``cases`` catches, and show the results.

    Args:
        backend: The backend's name.
        cases: The cases that may catch mutants.
        fields: Configuration fields of every engine.
        as_json: Print JSON instead of a line for each mutant.

    Returns:
        True if all were caught.
    """
    results: list[MutantResult] = []
    ids = {case.id for case in cases}
    mutants = [mutant for mutant in all_mutants() if mutant.caught_by in ids]
    with progress_bar(backend, len(mutants)) as advance:
        for result in try_mutants(backend, mutants, fields):
            results.append(result)
            advance(result.mutant.name)
            if not as_json:
                _show(result)
    caught = sum(result.caught for result in results)
    if as_json:
        shown = ("name", "wrong", "caught_by")
        entries = [
            {**{name: getattr(one.mutant, name) for name in shown}, "caught": one.caught, "message": one.message}
            for one in results
        ]
        print_json({"backend": backend, "mutants": entries})
    else:
        for result in results:
            if not result.caught:
                _show(result)  # repeated, because CI may keep only the end of a long log
        out.print(f"{caught} of {len(results)} mutants caught")
        if left := len(mutants) - len(results):
            out.print(f"{left} more were not tried: {backend} does not claim what their cases need")
    return caught == len(results)


def _show(result: MutantResult) -> None:
    mark, style = ("caught ", "") if result.caught else ("MISSED ", "red")
    line = f"{mark} {result.mutant.name}: {result.mutant.wrong} [{result.mutant.caught_by}]"
    out.print(Text(line if result.caught else f"{line}\n  {result.message}"), style=style, soft_wrap=True)


def try_mutants(
    backend: str, mutants: Sequence[Mutant], fields: Mapping[str, object] = MappingProxyType({})
) -> Iterator[MutantResult]:
    """Yield the result of each mutant, except those whose case ``backend`` lacks a capability for.

    ``fields`` are configuration fields of every engine.
    """
    cases = {case.id: case for case in all_cases()}
    unknown = {mutant.caught_by for mutant in mutants} - cases.keys()
    if unknown:
        raise LookupError(f"mutants are meant for cases that there are not: {', '.join(sorted(unknown))}")
    correct = _verdicts_of_the_correct_engine(backend, [cases[mutant.caught_by] for mutant in mutants], fields)
    for mutant in mutants:
        before = correct[mutant.caught_by]
        if mutant.needs is not None and before.verdict is Verdict.REFUSED:
            continue
        if before.verdict not in (Verdict.PASSED, Verdict.REFUSED):
            yield MutantResult(mutant, False, f"the correct engine does not pass either: {before.judgement.message}")
            continue
        yield _judge(mutant, _execute(backend, mutant, cases[mutant.caught_by], fields))


def _judge(mutant: Mutant, result: CaseResult) -> MutantResult:
    message = result.judgement.message
    if result.verdict is not Verdict.FAILED:
        return MutantResult(mutant, False, f"its case ended as {result.verdict.value}")
    if not any(part in message for part in mutant.says):
        expected = " or ".join(map(repr, mutant.says))
        return MutantResult(mutant, False, f"its case failed, but not with {expected}: {message}")
    return MutantResult(mutant, True, message)


def _verdicts_of_the_correct_engine(
    backend: str, cases: Sequence[Case], fields: Mapping[str, object]
) -> Mapping[str, CaseResult]:
    with Runner(suite_of_mutant(backend, None, fields)(), profile=MUTANT_PROFILE) as runner:
        return {case.id: runner.execute(case) for case in {case.id: case for case in cases}.values()}


def _execute(backend: str, mutant: Mutant, case: Case, fields: Mapping[str, object]) -> CaseResult:
    profile = _PROFILE_OF_HANGS if "hangs" in mutant.says else MUTANT_PROFILE
    wrong = mutant.spoil_rank
    with (
        nullcontext() if wrong is None else spoiled_ranks(wrong),
        Runner(suite_of_mutant(backend, mutant, fields)(), profile=profile) as runner,
    ):
        return runner.execute(case)


def suite_of_mutant(
    backend: str, mutant: Mutant | None, fields: Mapping[str, object] = MappingProxyType({})
) -> type[Suite]:
    """Return the suite of ``backend`` spoiled as ``mutant`` says, or of the correct one.

    ``fields`` are configuration fields of every engine, beside those of the backend's suite.
    """
    correct = suite_of(backend)
    of_every_engine = {**correct.fields, **fields}
    # A spoiled class exists in this process alone, so that a backend that asks for a process of its own runs here too.
    is_hosted = registry.load_backend(backend).endangers_its_process

    class MutantSuite(correct):  # type: ignore[valid-type, misc]
        """The suite of a backend that is spoiled in one way."""

        isolation = None if is_hosted else Isolation.INLINE
        fields = of_every_engine

        def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
            if mutant is not None and mutant.spoil_backend is not None:
                with registered(mutant.spoil_backend(registry.load_backend(backend))) as name:
                    return create_engine({**self.fields, "isolation": Isolation.INLINE, "backend": name, **fields})
            engine: InferenceEngine = super().open_engine(fields)
            if mutant is None:
                return engine
            if mutant.spoil_engine is not None:
                # The page is concrete and made in one place, so a spoiled one is the correct one with another class.
                engine.__class__ = mutant.spoil_engine(type(engine))
            if mutant.spoil_part is not None:
                kinds = mutant.spoil_part(PartKinds())
                engine.parts = kinds.build(engine.config, engine.parts.backend, engine.capabilities)
            return engine

    return MutantSuite


@contextmanager
def registered(spoiled: type[Backend]) -> Iterator[str]:
    """Let ``create_engine`` find the spoiled class in this process, under a name of its own."""
    spoiled.name = f"{spoiled.name}-spoiled"
    spoiled.endangers_its_process = False
    plugin = _Plugin(spoiled)
    registry.register(plugin)
    try:
        yield spoiled.name
    finally:
        registry.unregister(plugin)


class _Plugin:
    def __init__(self, backend: type[Backend]) -> None:
        self._backend = backend

    @hookimpl
    def drivetrain_backends(self) -> list[type[Backend]]:
        return [self._backend]
