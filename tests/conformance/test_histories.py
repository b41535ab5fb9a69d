"""The random tests find a fault, shrink it, and hand over a script that shows it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import broken_backends as broken_backends_plugin
from broken_backends import BROKEN, KeepsStaleCache, LosesAborted, NeverFreezes
from drivetrain import Capability, EngineConfig, MemoryTag, PauseMode, SamplingParams, create_engine
from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain.backend.registry import register, unregister
from drivetrain.engine.validation import as_prompts, check_params_supported
from drivetrain.errors import EngineBusy, EngineStateError, UnsupportedCapability
from drivetrain.testing import tiny_model
from drivetrain_conformance.assets.served_models import Models
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.engine_model.actions import (
    LONG,
    Abort,
    Action,
    Ask,
    BrokenUpdate,
    Continue,
    Family,
    Generate,
    History,
    Pause,
    Proceed,
    Sleep,
    Update,
    WakeUp,
    steps,
)
from drivetrain_conformance.engine_model.contract import Contract, Fate, InFlight, Refusal, Ruling, Weights
from drivetrain_conformance.engine_model.expected_answers import Answers
from drivetrain_conformance.engine_model.random_history import Checker
from drivetrain_conformance.engine_model.strategies import (
    AbortPoint,
    Batch,
    WeightPlanChoice,
    batches,
    sampling_params,
    weight_plans,
)
from drivetrain_conformance.harness.runner import Runner
from drivetrain_conformance.harness.suite import suite_of
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.references.oracle import TransformersOracle
from drivetrain_transformers.engine import TransformersBackend

T = TypeVar("T")

KV_CACHE = frozenset({MemoryTag.KV_CACHE})
WEIGHTS = frozenset({MemoryTag.WEIGHTS})
BOTH = KV_CACHE | WEIGHTS
IDS = list(range(32, 120))
PROMPTS = [list(range(start, start + 20)) for start in (40, 41, 90)]


# Strategies ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.data(), st.frozensets(st.sampled_from(list(Capability))))
def test_params_need_only_what_is_claimed(data: st.DataObject, capabilities: frozenset[Capability]) -> None:
    params = data.draw(sampling_params(IDS, capabilities))
    check_params_supported(params, EngineConfig(backend="none", model="none"), capabilities)


def test_every_field_is_drawn_when_all_is_claimed() -> None:
    drawn: set[str] = set()

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(sampling_params(IDS, frozenset(Capability)))
    def collect(params: SamplingParams) -> None:
        drawn.update(params.model_dump(exclude_defaults=True))

    collect()
    assert drawn == set(SamplingParams.model_fields)


@settings(max_examples=25, deadline=None)
@given(batches(IDS, frozenset(Capability), chat=True))
def test_batches_are_well_formed(batch: Batch) -> None:
    assert as_prompts(batch.prompts) == batch.prompts
    assert len(batch.params) == len(batch.prompts)


@given(weight_plans(1000))
def test_buckets_are_no_larger_than_all_of_it(plan: WeightPlanChoice) -> None:
    assert 1 <= plan.bucket_bytes <= 1000


# The contract --------------------------------------------------------------------------------------------------------


def accepted(ruling: Ruling) -> Contract:
    assert ruling.refusal is None
    return ruling.after


def running(contract: Contract) -> Contract:
    return accepted(contract.generate("r"))


READY = Contract("v0")


@pytest.mark.parametrize(
    ("mode", "in_flight", "late", "afterwards"),
    [
        (PauseMode.ABORT, Fate.ABORTED, Fate.WAITING, (Fate.ABORTED, Fate.RUNNING)),
        (PauseMode.IN_PLACE, Fate.FROZEN, Fate.WAITING, (Fate.RUNNING, Fate.RUNNING)),
        (PauseMode.RETRACT, Fate.FROZEN, Fate.WAITING, (Fate.RUNNING, Fate.RUNNING)),
        (PauseMode.WAIT, Fate.DONE, Fate.WAITING, (Fate.DONE, Fate.RUNNING)),
    ],
)
def test_the_pause_table(mode: PauseMode, in_flight: Fate, late: Fate, afterwards: tuple[Fate, Fate]) -> None:
    paused = accepted(accepted(running(READY).pause(mode)).generate("late"))
    assert (paused.state, paused.requests["r"].fate, paused.requests["late"].fate) == ("paused", in_flight, late)
    free = accepted(paused.continue_generation())
    assert (free.state, free.requests["r"].fate, free.requests["late"].fate) == ("ready", *afterwards)


def test_asleep_refuses_requests_unless_a_pause_lets_them_wait() -> None:
    asleep = accepted(READY.sleep(KV_CACHE, InFlight.LEAVE))
    assert asleep.generate("r").refusal == Refusal(EngineStateError, "asleep")
    paused = accepted(asleep.pause(PauseMode.ABORT))
    waiting = accepted(paused.generate("r"))
    assert waiting.requests["r"].fate is Fate.WAITING
    assert accepted(waiting.wake_up(KV_CACHE)).requests["r"].fate is Fate.WAITING


def test_sleep_is_refused_while_requests_are_in_flight_but_not_when_they_are_retracted() -> None:
    assert running(READY).sleep(KV_CACHE, InFlight.LEAVE).refusal == Refusal(EngineBusy, unless_ended=True)
    frozen = accepted(running(READY).pause(PauseMode.IN_PLACE))
    assert frozen.sleep(KV_CACHE, InFlight.DRAIN).refusal == Refusal(EngineBusy)
    assert accepted(frozen.sleep(KV_CACHE, InFlight.ABORT)).requests["r"].fate is Fate.ABORTED
    retracted = accepted(frozen.pause(PauseMode.RETRACT))
    assert accepted(retracted.sleep(KV_CACHE, InFlight.LEAVE)).requests["r"].fate is Fate.FROZEN


def test_nothing_but_a_complete_update_leads_out_of_dirty() -> None:
    slept = accepted(accepted(READY.sleep(WEIGHTS, InFlight.LEAVE)).wake_up(WEIGHTS))
    broken = accepted(READY.begin_update(PauseMode.ABORT)).break_update()
    for dirty in (slept, broken):
        assert (dirty.state, dirty.version) == ("dirty", "v0")
        assert dirty.generate("r").refusal == Refusal(EngineStateError, "dirty")
        assert dirty.continue_generation().refusal == Refusal(EngineStateError, "dirty")
        assert accepted(dirty.begin_update(PauseMode.ABORT)).break_update().state == "dirty"
        ready = accepted(dirty.begin_update(PauseMode.ABORT)).commit_update("v1")
        assert (ready.state, ready.version) == ("ready", "v1")


def test_weights_that_are_kept_come_back_clean() -> None:
    keeps = dataclasses.replace(READY, keeps_weights=True)
    assert accepted(accepted(keeps.sleep(WEIGHTS, InFlight.LEAVE)).wake_up(WEIGHTS)).state == "ready"


def test_an_update_is_refused_while_the_weights_sleep_and_while_another_is_under_way() -> None:
    asleep = accepted(READY.sleep(WEIGHTS, InFlight.LEAVE))
    assert asleep.begin_update(PauseMode.ABORT).refusal == Refusal(EngineStateError, "asleep")
    updating = accepted(READY.begin_update(PauseMode.ABORT))
    assert updating.begin_update(PauseMode.ABORT).refusal == Refusal(EngineStateError, "updating")
    assert updating.pause(PauseMode.ABORT).refusal == Refusal(EngineStateError, "updating")
    assert accepted(updating.generate("r")).requests["r"].fate is Fate.WAITING


def test_an_update_in_flight_needs_its_capability_unless_the_requests_have_ended() -> None:
    unable = dataclasses.replace(READY, capabilities=frozenset({Capability.ABORT}))
    ruling = running(unable).begin_update(PauseMode.RETRACT)
    assert ruling.refusal == Refusal(UnsupportedCapability, unless_ended=True)
    assert ruling.after.weights is Weights.UPDATING


@pytest.mark.parametrize(("mode", "stale"), [(PauseMode.RETRACT, frozenset()), (PauseMode.IN_PLACE, frozenset({"v1"}))])
def test_spans_and_which_of_them_have_a_cache_of_older_weights(mode: PauseMode, stale: frozenset[str]) -> None:
    updated = accepted(running(READY).begin_update(mode)).commit_update("v1")
    request = updated.requests["r"]
    assert (request.fate, request.versions, request.stale) == (Fate.RUNNING, ("v0", "v1"), stale)
    recomputed = accepted(accepted(updated.pause(PauseMode.RETRACT)).begin_update(PauseMode.IN_PLACE))
    again = accepted(recomputed.commit_update("v2").continue_generation()).requests["r"]
    assert (again.versions, again.stale) == (("v0", "v1", "v2"), stale)


def test_an_abort_while_it_runs_is_a_race_and_otherwise_is_none() -> None:
    assert accepted(running(READY).abort("r")).requests["r"].raced
    frozen = accepted(running(READY).pause(PauseMode.IN_PLACE))
    assert not accepted(frozen.abort(None)).requests["r"].raced
    assert accepted(frozen.abort("nobody")) == frozen


# Histories -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    made = Models()
    yield made
    made.close()


@contextmanager
def checking(models: Models, backend: str = "transformers", contract: type[Contract] = Contract) -> Iterator[Checker]:
    """Yield a checker with its own engine and event loop."""
    model = tiny_model("qwen2")
    with asyncio.Runner() as runner:

        def run(coroutine: Coroutine[object, object, T]) -> T:
            return runner.run(coroutine)

        engine = create_engine(backend, model=str(model), isolation="inline")
        run(engine.start())
        try:
            folders = [model, models.with_other_weights(model, 1)]
            noting = Answers.note(engine, folders, PROMPTS, LONG, oracle=TransformersOracle, tolerance=5e-4)
            answers = run(noting)
            ruled = contract(engine.get_weight_version(), engine.capabilities)
            yield Checker(run, engine, answers, PROMPTS, ruled, shrink_seconds=8)
        finally:
            run(engine.teardown())


def any_step(*families: Family) -> st.SearchStrategy[tuple[Action, ...]]:
    capabilities = TransformersBackend.capabilities(EngineConfig(backend="transformers", model="none"))
    claimed = capabilities | {Capability.PAUSE_ABORT, Capability.PAUSE_WAIT}
    return steps(frozenset(families), claimed, prompts=len(PROMPTS), weight_sets=2)


def note_of(error: BaseException, beginning: str) -> str:
    """The one note of `error` that begins so; hypothesis adds its own."""
    (note,) = (note for note in error.__notes__ if note.startswith(beginning))
    return note


def run_script(error: BaseException, folder: Path, backend: str, path: str = "") -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(note_of(error, "This script reproduces it:").partition("\n\n")[2])
    paths = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(script), backend, str(tiny_model("qwen2"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def test_random_histories_hold(models: Models) -> None:
    with checking(models) as checker:
        checker.check_random(any_step(*Family), examples=3, steps=8, seeded_by=3)


LONG_REQUEST = Generate(0, long=True)
STREAM = Generate(0, long=True, streamed=True)
RETRACTED_ASLEEP = (LONG_REQUEST, Pause(PauseMode.RETRACT), Sleep(KV_CACHE), Continue())


@pytest.mark.parametrize("waiting", [Pause(PauseMode.WAIT), Update(1, PauseMode.WAIT)], ids=["pause", "update"])
def test_waiting_for_frozen_requests_is_refused_whatever_froze_them(models: Models, waiting: Action) -> None:
    with checking(models) as checker:
        for frozen in (
            (LONG_REQUEST, Pause(PauseMode.IN_PLACE)),
            (LONG_REQUEST, BrokenUpdate(1, PauseMode.RETRACT)),
            RETRACTED_ASLEEP,
        ):
            checker.check(History((*frozen, waiting)))


@pytest.mark.parametrize(
    "actions",
    [
        (LONG_REQUEST, Update(1, PauseMode.RETRACT), Pause(PauseMode.IN_PLACE), Update(0, PauseMode.IN_PLACE)),
        (
            LONG_REQUEST,
            Pause(PauseMode.RETRACT),
            Sleep(WEIGHTS | KV_CACHE),
            WakeUp(WEIGHTS),
            Update(1),
            WakeUp(KV_CACHE),
        ),
        (*RETRACTED_ASLEEP, Generate(1), WakeUp(KV_CACHE), Generate(1)),
    ],
    ids=["stale cache", "weights slept", "continued asleep"],
)
def test_these_histories_hold(models: Models, actions: tuple[Action, ...]) -> None:
    with checking(models) as checker:
        checker.check(History(actions))


IN_FLIGHT = {
    PauseMode.IN_PLACE: Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE,
    PauseMode.RETRACT: Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
}


class OneMode(TransformersBackend):
    """Claims weight updates in flight in one freeze mode only."""

    mode: ClassVar[PauseMode]

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Leave out the other mode's capability."""
        return super().capabilities(config) - (set(IN_FLIGHT.values()) - {IN_FLIGHT[cls.mode]})


@pytest.fixture(params=list(IN_FLIGHT), ids=lambda mode: mode.value)
def one_mode(request: pytest.FixtureRequest) -> Iterator[type[OneMode]]:
    """A registered backend that can update weights in flight in one mode."""

    class Only(OneMode):
        name = f"only-{request.param.value}"
        mode = request.param

    class Plugin:
        @hookimpl
        def drivetrain_backends(self) -> list[type[Backend]]:
            return [Only]

    plugin = Plugin()
    register(plugin)
    yield Only
    unregister(plugin)


def test_updates_in_flight_are_taken_in_the_claimed_mode_alone(models: Models, one_mode: type[OneMode]) -> None:
    with checking(models, one_mode.name) as checker:
        for mode in PauseMode:
            checker.check(History((LONG_REQUEST, Update(1, mode))))
            checker.check(History((LONG_REQUEST, BrokenUpdate(1, mode))))


@pytest.mark.slow
def test_the_suite_looks_at_each_claimed_mode_of_an_update_in_flight(one_mode: type[OneMode]) -> None:
    suite = type("Only", (suite_of("transformers"),), {"backend": one_mode.name})
    cases = [case for case in all_cases() if not case.needs.isdisjoint(IN_FLIGHT.values())]
    with Runner(suite()) as runner:
        verdicts = {case.id: runner.execute(case).verdict for case in cases if not case.own_engine}
    looked_at = {case.id: IN_FLIGHT[one_mode.mode] in case.needs for case in cases}
    assert verdicts == {name: Verdict.PASSED if claimed else Verdict.REFUSED for name, claimed in looked_at.items()}
    assert set(verdicts.values()) == {Verdict.PASSED, Verdict.REFUSED}


class ServesAsleep(Contract):
    """A wrong contract: requests wait through a sleep even without a pause."""

    def generate(self, name: str) -> Ruling:
        awake = Contract.generate(dataclasses.replace(self, asleep=frozenset()), name)
        return Ruling(dataclasses.replace(awake.after, asleep=self.asleep), awake.refusal)


@pytest.mark.slow
def test_a_difference_is_shrunk(models: Models) -> None:
    with (
        checking(models, contract=ServesAsleep) as checker,
        pytest.raises(EngineStateError, match="asleep") as caught,
    ):
        checker.check_random(any_step(Family.REQUESTS, Family.SLEEPS), examples=50, steps=8, seeded_by=0)
    note_of(caught.value, "It failed at Generate(")
    script = note_of(caught.value, "This script reproduces it:")
    actions = script.partition("ACTIONS = (\n")[2].partition("\n)")[0].splitlines()
    assert len(actions) <= 3, f"the history was not shrunk: {actions}"


@pytest.fixture
def broken_backends(tmp_path: Path) -> Iterator[str]:
    """Backends with one fault each, in this process and, through the returned import path, in new ones."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    names = "".join(f"{backend.name} = broken_backends\n" for backend in BROKEN)
    (info / "entry_points.txt").write_text(f"[drivetrain]\n{names}")
    register(broken_backends_plugin)
    yield os.pathsep.join([str(tmp_path), str(Path(broken_backends_plugin.__file__).parent)])
    unregister(broken_backends_plugin)


@pytest.mark.slow
def test_a_fault_is_shown_by_its_script_on_the_backend_that_has_it_and_on_no_other(
    models: Models, broken_backends: str, tmp_path: Path
) -> None:
    with checking(models, LosesAborted.name) as checker, pytest.raises(AssertionError, match="had made") as caught:
        checker.check(History((LONG_REQUEST, Generate(1), Abort(0, AbortPoint(1)))))
    broken = run_script(caught.value, tmp_path, LosesAborted.name, broken_backends)
    assert broken.returncode == 1
    assert "it had made a token, and came back with []" in broken.stderr
    correct = run_script(caught.value, tmp_path, "transformers", broken_backends)
    assert correct.returncode == 0, correct.stderr


@pytest.mark.usefixtures("broken_backends")
@pytest.mark.parametrize(
    ("backend", "actions", "says"),
    [
        (NeverFreezes, (STREAM, Proceed(), Pause(PauseMode.IN_PLACE), *[Generate(1)] * 40), "a frozen request"),
        (KeepsStaleCache, (LONG_REQUEST, Ask(), Update(1, PauseMode.RETRACT)), "nats below the most likely one"),
    ],
)
def test_faults_are_found(models: Models, backend: type[Backend], actions: tuple[Action, ...], says: str) -> None:
    with checking(models, backend.name) as checker, pytest.raises(AssertionError, match=says):
        checker.check(History(actions))
