"""Run cases one after another and judge how each ends."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import psutil

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig, UnsupportedCapability
from drivetrain.process.process_tree import runs
from drivetrain.types.capability import Capability
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_conformance.harness.capability_results import CapabilityResults
from drivetrain_conformance.harness.case import Case, Hardware
from drivetrain_conformance.harness.engine_keeper import EngineKeeper
from drivetrain_conformance.harness.run_profile import LEFT_OUT, PROFILES, Profile
from drivetrain_conformance.harness.suite import Suite
from drivetrain_conformance.harness.testbench import Bench, NoOracle, TooLate
from drivetrain_conformance.harness.time_limits import Hangs, until_ended
from drivetrain_conformance.harness.verdict import Judgement, Verdict, apply_known_failures, describe, judge
from drivetrain_conformance.references.oracle import Oracle

_T = TypeVar("_T")
_CANCEL_SECONDS: Final = 20.0
_ATTEMPTS: Final = 6
"""Attempts in all of a case that comes too late: each has requests of twice the length."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one case."""

    case: Case
    judgement: Judgement
    seconds: float
    error: BaseException | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict of the judgement."""
        return self.judgement.verdict


class Runner:
    """Execute the cases of one suite, all in one event loop. Use as a context manager."""

    def __init__(
        self, suite: Suite, *, profile: Profile | None = None, seed: int | None = None, models: Models | None = None
    ) -> None:
        self.suite = suite
        self.profile = profile or PROFILES[suite.profile]
        self.seed = suite.seed if seed is None else seed
        self.capability_results = CapabilityResults()
        self.models = models or Models(layers=suite.layers)
        self._loop = asyncio.Runner()
        self._keeper = EngineKeeper(self._open)
        self._oracles: dict[Path, Oracle | None] = {}
        self.versions: dict[str, str] = {}
        """Versions of the opened engines and their packages."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tear down the open engine and remove the model folders that were made."""
        try:
            self._loop.run(self._keeper.close())
            self._loop.close()
        finally:
            self.models.close()

    def execute(self, case: Case) -> CaseResult:
        """Run one case and judge its end."""
        begun = time.monotonic()
        judgement, error = self._judged(case)
        judgement = apply_known_failures(case.id, judgement, error, self.suite.known_failures)
        self.capability_results.record(case.id, case.needs, judgement.verdict)
        return CaseResult(case, judgement, time.monotonic() - begun, error)

    # ---------------------------------------------------------------------------------------------------------------

    def _open(self, fields: dict[str, object]) -> InferenceEngine:
        engine = self.suite.open_engine(fields)
        self.versions.update(engine.versions)
        return engine

    def _judged(self, case: Case) -> tuple[Judgement, BaseException | None]:
        if reason := self.suite.left_out(case.id):
            return Judgement(Verdict.NOT_RUN, reason), None
        if case.slow and not self.profile.slow_cases:
            return Judgement(Verdict.NOT_RUN, LEFT_OUT), None
        wanted: Mapping[str, object] = case.config
        kind = case.model
        try:
            try:
                missing = case.needs - self._claimed_with(kind, wanted)
            except InvalidConfig:
                # A backend need not know a configuration field of a capability that it lacks, or a kind of model that
                # needs one; the body's calls are still refused.
                wanted = {}
                kind, missing = self._refusing(case)
                if not missing:
                    raise
        except UnsupportedCapability as error:  # the configuration itself is refused
            return judge(case.needs, case.needs, error), error
        except Exception as error:
            return Judgement(Verdict.FAILED, f"no engine could be made: {describe(error)}"), error
        if missing and (other := self._elsewhere(case, wanted)) is not None:
            wanted, missing = other, frozenset()
        if missing:
            # The case must be refused, so any engine that lacks something serves: the open one, or the text model's.
            if lacking := self._open_engine_lacks(case):
                kind, wanted, missing = ModelKind.TEXT, self._keeper.fields, lacking
            elif lacking := case.needs - self._claimed_with(ModelKind.TEXT, wanted):
                kind, missing = ModelKind.TEXT, lacking
        elif not _has(case.hardware):
            return Judgement(Verdict.NOT_RUN, f"this machine lacks {case.hardware.value}"), None
        judged, raised = self._attempt(case, self.models.path(kind), wanted, missing)
        for attempt in range(1, _ATTEMPTS):
            if not isinstance(raised, TooLate):
                break
            judged, raised = self._attempt(case, self.models.path(kind), wanted, missing, attempt)
        return judged, (raised.__cause__ or raised) if isinstance(raised, TooLate) else raised

    def _attempt(
        self, case: Case, model: Path, wanted: Mapping[str, object], missing: frozenset[Capability], attempt: int = 0
    ) -> tuple[Judgement, BaseException | None]:
        """Run a case's body once, and look at the engine afterwards."""
        children = _children()
        try:
            engine: InferenceEngine | None = None
            if case.own_engine:
                self._loop.run(self._keeper.close())
                children = _children()
            else:
                engine = self._loop.run(self._keeper.get(model, wanted))
        except Exception as error:
            return Judgement(Verdict.FAILED, f"the engine did not start: {describe(error)}"), error
        judged, raised = self._run_body(case, self._bench(case, model, wanted, engine, attempt), missing)
        return self._looked_at_afterwards(case, judged, children), raised

    def _refusing(self, case: Case) -> tuple[ModelKind, frozenset[Capability]]:
        """Return the model for a case whose configuration is refused, and what an engine of it leaves unclaimed.

        It is the text model if the backend serves no model of the case's kind, and says so by the field ``model``.
        """
        try:
            return case.model, case.needs - self._claimed_with(case.model, {})
        except InvalidConfig as error:
            if error.field != "model":
                raise
            return ModelKind.TEXT, case.needs - self._claimed_with(ModelKind.TEXT, {})

    def _open_engine_lacks(self, case: Case) -> frozenset[Capability]:
        """Return the capabilities that a case needs and the open engine lacks; if any, it can refuse the case."""
        engine = self._keeper.engine
        if case.own_engine or engine is None or engine.config.model != str(self.models.path(ModelKind.TEXT)):
            return frozenset()
        return case.needs - engine.capabilities

    def _elsewhere(self, case: Case, wanted: Mapping[str, object]) -> Mapping[str, object] | None:
        """Return the first configuration of ``suite.elsewhere`` that claims everything the case needs; else None."""
        for fields in self.suite.elsewhere:
            other = {**fields, **wanted}
            try:
                if case.needs <= self._claimed_with(case.model, other):
                    return other
            except (InvalidConfig, UnsupportedCapability):
                continue
        return None

    def _claimed_with(self, kind: ModelKind, fields: Mapping[str, object]) -> frozenset[Capability]:
        """Return the capabilities that an engine of this model and configuration claims, without starting it."""
        claimed = self.suite.claims({"model": str(self.models.path(kind)), **fields})
        self.capability_results.claim(claimed)
        return claimed

    def _bench(
        self, case: Case, model: Path, wanted: Mapping[str, object], engine: InferenceEngine | None, attempt: int
    ) -> Bench:
        return Bench(
            models=self.models,
            model=model,
            profile=self.profile,
            seed=self.seed,
            opener=self._open,
            oracles=self._oracles,
            make_oracle=self.suite.oracle,
            run=self._run,
            own_engine=case.own_engine,
            fields=wanted,
            shared=engine,
            tokens_per_second=self._keeper.tokens_per_second,
            rng=random.Random(f"{self.seed} {case.id}"),
            attempt=attempt,
        )

    def _run_body(
        self, case: Case, bench: Bench, missing: frozenset[Capability]
    ) -> tuple[Judgement, BaseException | None]:
        error: BaseException | None = None
        try:
            if inspect.iscoroutinefunction(case.body):
                self._run(case.body(bench))
            else:
                case.body(bench)
        except NoOracle:
            return Judgement(Verdict.NOT_RUN, "the suite was given no oracle to compare with"), None
        except TooLate as late:
            return judge(case.needs, missing, late.__cause__ or late), late
        except Exception as raised:  # any error is judged below
            error = raised
        return judge(case.needs, missing, error), error

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run(self._bounded(coroutine))

    async def _bounded(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Await ``coroutine``; on timeout cancel it, and abandon it if that takes too long."""
        task = asyncio.ensure_future(coroutine)
        if not await until_ended(task, seconds=self.profile.case_timeout):
            task.cancel()
            await until_ended(task, seconds=_CANCEL_SECONDS)
            raise Hangs(f"hangs: the case did not end within {self.profile.case_timeout:g} s")
        return task.result()

    def _looked_at_afterwards(self, case: Case, judged: Judgement, children: frozenset[int]) -> Judgement:
        """Fail a case that passed or was refused if it left processes behind or changed the shared engine."""
        fine = judged.verdict in (Verdict.PASSED, Verdict.REFUSED)
        if case.own_engine:
            left = _children() - children - self.suite.own_processes()
            for pid in left:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            found = f"processes {sorted(left)} are left behind" if left else ""
        else:
            may_differ = case.changes_weights and judged.verdict is not Verdict.REFUSED
            try:
                found = self._run(self._keeper.changes(weights_may_differ=may_differ))
            except Exception as error:
                found = f"the engine could not be looked at: {describe(error)}"
        if fine and found:
            return Judgement(Verdict.FAILED, f"{judged.verdict.value}, but left something changed: {found}")
        return judged


def _children() -> frozenset[int]:
    """Return the pids of this process's running descendants, zombies excluded."""
    return frozenset(child.pid for child in psutil.Process().children(recursive=True) if runs(child))


def _has(hardware: Hardware) -> bool:
    gpus = gpu_count()
    enough = {
        Hardware.ANY: True,
        Hardware.GPU: gpus >= 1,
        Hardware.TWO_GPUS: gpus >= 2,
        Hardware.TWO_RANKS: gpus != 1,
    }
    return enough[hardware]


def gpu_count() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()
