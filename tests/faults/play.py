"""Play a fault, and check what must hold after any fault."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from tests.faults.desk import Desk
from tests.faults.fault import Blow, Fault, Stage, Victim, gone
from tests.faults.line import LineLost
from tests.faults.sender import Job, Report, differing, weights_of

from drivetrain import EngineState, GenerationOutput, InferenceEngine, SamplingParams
from drivetrain.errors import DeadlineExceeded, EngineDied, EngineStateError, InvalidRequest, from_wire
from drivetrain.process.process_tree import runs
from drivetrain.process.shared_memory_files import shared_memory_of
from drivetrain.types.weights import WeightPlan
from drivetrain_conformance.assertions.leftovers import Holdings, temporary_folder
from drivetrain_weight_sync.transports.disk import DiskSender

PAUSE_S: Final = 0.3
"""Seconds for which a process that is soon thawed is frozen."""
SLACK_S: Final = 5.0
"""Seconds allowed beyond configured deadlines, as the machine is busy."""


def family_of(host: int) -> list[psutil.Process]:
    """Return a host and its descendants."""
    process = psutil.Process(host)
    return [process, *process.children(recursive=True)]


@dataclass(frozen=True, slots=True)
class HostHoldings:
    """Resources of a host and its descendants that could pile up."""

    processes: int
    threads: int
    files: int
    connections: int
    arenas: int

    @classmethod
    def of(cls, pid: int) -> HostHoldings:
        family = family_of(pid)
        return cls(
            processes=len(family),
            threads=sum(process.num_threads() for process in family),
            files=sum(process.num_fds() for process in family),
            connections=sum(len(process.net_connections(kind="inet")) for process in family),
            arenas=sum(Path(f"/proc/{p.pid}/maps").read_text().count("memfd:drivetrain-weights") for p in family),
        )

    def more_than(self, other: HostHoldings) -> list[str]:
        names = ("processes", "threads", "files", "connections", "arenas")
        return [
            f"{name}: {getattr(self, name)}, before {getattr(other, name)}"
            for name in names
            if getattr(self, name) > getattr(other, name)
        ]


@dataclass(repr=False)
class Theatre:
    """The setting in which faults are played, and the count of their outcomes."""

    backend: str
    model: Path
    stage: Stage
    folder: Path
    """Parent of the temporary folders."""
    open: Callable[[Theatre], AbstractAsyncContextManager[InferenceEngine]]
    fields: dict[str, Any]
    """Configuration of a trainer's own engine."""
    outcomes: Counter[tuple[str, ...]]
    bound: float = 30.0
    """Seconds within which every caller must have got an answer or error."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Pid of each rank, for engines whose ranks are processes."""
    keeps: bool = False
    """An engine that survives is used again."""
    shared: set[Path] = field(default_factory=set)
    """Shared-memory files of engines that have ended."""

    @property
    def inline(self) -> Theatre:
        """The same theatre with engines in their trainer's process."""
        return replace(self, fields={**self.fields, "isolation": "inline"})

    def version(self) -> str:
        """Return a version that was not pushed before."""
        return f"step-{next(_versions)}"

    def note(self, fault: Fault, told: str, outcome: str) -> None:
        """Count a fault's outcome."""
        where = (self.backend, fault.victim.value, fault.blow.value, fault.transport, str(fault.point))
        self.outcomes[*where, told, outcome] += 1


_versions: Final = itertools.count(1)


async def play(fault: Fault, theatre: Theatre) -> None:
    """Play one fault and check what must hold.

    Every caller is served or gets a typed error in time. The version that the engine claims was committed, and its
    weights are there bit for bit. A full push by another sender mends what can be mended. Nothing is left behind.
    """
    print(fault)
    temporary = theatre.folder / theatre.version()
    temporary.mkdir()
    if theatre.keeps:
        async with theatre.open(theatre):
            pass
    theatre.stage.clear()
    with temporary_folder(temporary):
        before = Holdings.now()
        async with asyncio.timeout(10 * theatre.bound):
            if fault.victim is Victim.TRAINER:
                await _play_trainer(fault, theatre, temporary)
            else:
                await _play_sender(fault, theatre, temporary)
        await _check_nothing_left(before, theatre)
    temporary.rmdir()


async def _check_nothing_left(before: Holdings, theatre: Theatre) -> None:
    """Check this process and engines that ended; other programs use the machine's shared memory too."""
    ends = time.monotonic() + SLACK_S
    while True:
        now = replace(Holdings.now(), shared_memory=before.shared_memory)
        left = now.left_since(before) or " ".join(str(file) for file in theatre.shared if file.exists())
        if not left:
            return
        assert time.monotonic() < ends, f"left behind: {left}"
        await asyncio.sleep(0.05)


# An engine whose sender is another process ----------------------------------------------------------------------------


async def _play_sender(fault: Fault, theatre: Theatre, temporary: Path) -> None:
    job = Job(theatre.model, fault.transport, temporary)
    async with theatre.open(theatre) as engine, _desk(job, engine, theatre) as sender:
        own = engine.get_weight_version()
        baseline = None
        if fault.point.step != "Join":  # a sender forms its group only once
            own = theatre.version()
            _check_success(await sender.push(own))
            await _check_served(theatre, engine, own)
            assert engine.host_pid is not None
            baseline = HostHoldings.of(engine.host_pid)
        assert engine.host_pid is not None
        shared = shared_memory_of(family_of(engine.host_pid))
        new = theatre.version()
        flight = asyncio.create_task(_long_answer(engine)) if fault.in_flight else None
        if flight is not None:
            await asyncio.sleep(0.05)
        theatre.stage.plan(fault, *_aim(fault, theatre, engine, sender))
        thawing = asyncio.create_task(_thaw_soon(fault, theatre))
        report, told = await _pushed(fault, sender, new, theatre)
        assert theatre.stage.struck, f"nobody came to {fault.point}"
        await thawing
        outcome = await _check_claims(fault, theatre, engine, own, new)
        if report is not None:
            _check_report(report, outcome, engine)
        theatre.note(fault, told, outcome)
        await _settle_sender(fault, theatre, engine, sender, report)
        if outcome == "failed":
            theatre.shared |= shared
            await _check_flight(flight, engine, {own, new}, theatre)
            async with asyncio.timeout(2 * engine.config.timeouts.close + SLACK_S):
                await engine.teardown()
            return
        last = theatre.version()
        async with _desk(job, engine, theatre) as other:
            _check_success(await other.push(last))
            await _check_served(theatre, engine, last)
            await _check_flight(flight, engine, {own, new, last}, theatre)
            await other.close(theatre.bound)
        if fault.victim is Victim.SENDER and fault.blow is Blow.RETURN:
            await _return(theatre, sender)
            await _check_served(theatre, engine, last)
        if baseline is not None:
            await _check_no_more(engine, baseline)


def _aim(fault: Fault, theatre: Theatre, engine: InferenceEngine, sender: Desk) -> tuple[int, int]:
    """Return the process to strike, and the rank that must reach the point."""
    match fault.victim:
        case Victim.SENDER:
            return sender.process.pid, 0
        case Victim.HOST:
            assert engine.host_pid is not None
            return engine.host_pid, 0
        case Victim.CORE:
            return psutil.Process(theatre.ranks[0]).ppid(), 0
        case Victim.RANK_0:
            return theatre.ranks[0], 0
        case Victim.RANK_1:
            # Only the sender stages, which counts as rank 0.
            return theatre.ranks[1], 0 if fault.point.step == "Stage" else 1
        case _:
            raise AssertionError(fault.victim)


async def _pushed(fault: Fault, sender: Desk, version: str, theatre: Theatre) -> tuple[Report | None, str]:
    """Let the sender push; return its report (None if it is lost or silent) and what its caller is told."""
    # A trainer that comes back does so after its own deadlines.
    times = 2 if fault.victim is Victim.TRAINER else 1
    sender.patience = times * theatre.fields["timeouts"]["weight_update"]
    begun = time.monotonic()
    try:
        report = await sender.push(version)
        told = "committed" if report.error is None else report.error[0]
    except (LineLost, DeadlineExceeded) as error:
        report, told = None, "sender lost" if isinstance(error, LineLost) else "sender silent"
    took = time.monotonic() - begun
    assert took < theatre.bound, f"the push ended after {took:.1f} s"
    return report, told


async def _thaw_soon(fault: Fault, theatre: Theatre) -> None:
    if fault.blow is Blow.PAUSE:
        await _struck(theatre)
        await asyncio.sleep(PAUSE_S)
        os.kill(theatre.stage.victim, signal.SIGCONT)


async def _struck(theatre: Theatre) -> None:
    async with asyncio.timeout(theatre.bound):
        while not theatre.stage.struck:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def _check_claims(fault: Fault, theatre: Theatre, engine: InferenceEngine, own: str, new: str) -> str:
    """Check the engine's claims against the points that were passed; return its condition in a word."""
    if fault.victim not in (Victim.SENDER, Victim.TRAINER) and fault.blow is not Blow.PAUSE:
        async with asyncio.timeout(theatre.bound):
            while engine.state is not EngineState.FAILED:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
    if engine.state is EngineState.FAILED:
        assert fault.victim not in (Victim.SENDER, Victim.TRAINER), engine.status.describe()
        with pytest.raises(EngineDied, match="failed"):
            await engine.generate("x", SamplingParams(max_new_tokens=1))
        if fault.blow is Blow.FREEZE:
            assert str(theatre.stage.victim) in engine.status.describe(), "it does not say which process was frozen"
            print(engine.status.describe().partition("\n")[0])
        assert engine.get_weight_version() in _possible(theatre, own, new)
        return "failed"
    if engine.state is EngineState.DIRTY:
        assert theatre.stage.passed("PrepareUpdate", "before"), "dirty, though no update was prepared"
        assert engine.get_weight_version() == own
        assert engine.is_paused
        await _check_refuses(engine, "dirty")
        return "dirty"
    assert engine.state is EngineState.READY, engine.status.describe()
    version = engine.get_weight_version()
    assert version in _possible(theatre, own, new)
    if version == own:
        assert not theatre.stage.passed("BeginUpdate", "before"), "ready, though an update had begun and not ended"
    await _check_served(theatre, engine, version)
    return "ready, new" if version == new else "ready, old"


def _possible(theatre: Theatre, own: str, new: str) -> set[str]:
    """Return the versions that may be published: the new one only if every rank has committed it."""
    ranks = theatre.stage.passed("PrepareUpdate", "before")
    return {own, new} if ranks and theatre.stage.passed("CommitUpdate", "after") == ranks else {own}


async def _check_refuses(engine: InferenceEngine, state: str) -> None:
    with pytest.raises(EngineStateError, match=state) as refused:
        await engine.generate("x", SamplingParams(max_new_tokens=1))
    assert refused.value.state == state


async def _check_served(theatre: Theatre, engine: InferenceEngine, version: str) -> None:
    """Check that the engine is ready, claims this version, holds its weights bit for bit, and answers with it."""
    assert engine.state is EngineState.READY, engine.status.describe()
    assert engine.get_weight_version() == version
    assert (await engine.check_weight_sync_integrity(version)).ok
    wrong = await differing(engine, weights_of(theatre.model, version))
    assert not wrong, f"{version!r} is claimed, but these are not of it: {wrong}"
    output = await engine.generate("What is", SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=0))
    assert [span.version for span in output.completions[0].weight_versions] == [version]


def _check_success(report: Report) -> None:
    assert report.error is None, report.error
    assert not report.bare, report.bare


def _check_report(report: Report, outcome: str, engine: InferenceEngine) -> None:
    """Check that the pusher was told the outcome, in words."""
    assert not report.bare, report.bare
    if report.error is None:
        assert outcome == "ready, new", f"the push is said to have succeeded; the engine is {outcome}"
        return
    error = from_wire(*report.error)
    assert type(error).__name__ == report.error[0]
    assert len(str(error)) > 20, f"it does not say what happened: {error!r}"
    if outcome == "failed":
        assert isinstance(error, EngineDied | DeadlineExceeded), error
        assert str(engine.host_pid) in engine.status.describe()


async def _check_flight(
    flight: asyncio.Task[GenerationOutput] | None, engine: InferenceEngine, versions: set[str], theatre: Theatre
) -> None:
    """Check that a request in flight ended: answered by committed weights, or with the engine."""
    if flight is None:
        return
    async with asyncio.timeout(theatre.bound):
        (answer,) = await asyncio.gather(flight, return_exceptions=True)
    if isinstance(answer, BaseException):
        assert isinstance(answer, EngineDied), answer
        assert engine.state is EngineState.FAILED, answer
        return
    made_by = {span.version for span in answer.completions[0].weight_versions}
    assert made_by <= versions, f"tokens of {made_by}; committed were some of {versions}"


async def _settle_sender(
    fault: Fault, theatre: Theatre, engine: InferenceEngine, sender: Desk, report: Report | None
) -> None:
    """Let a live sender close its resources; after a lost one, its owner frees what it held of the engine."""
    if report is not None and runs(sender.process):
        await sender.close(theatre.bound)
        return
    await sender.hang_up()
    if engine.state is not EngineState.FAILED:
        for group in sender.groups:
            with suppress(InvalidRequest):  # the group did not form
                await engine.destroy_weight_update_communicator(group)
    if fault.blow is not Blow.RETURN:
        sender.kill()
        await sender.ended()


async def _return(theatre: Theatre, sender: Desk) -> None:
    """Thaw a sender that was replaced: it must learn that it was given up, and end."""
    os.kill(sender.process.pid, signal.SIGCONT)
    async with asyncio.timeout(theatre.bound):
        await sender.ended()
    file = theatre.stage.folder / f"report-{sender.process.pid}"
    report: Report = pickle.loads(file.read_bytes())
    assert not report.bare, report.bare


async def _check_no_more(engine: InferenceEngine, baseline: HostHoldings) -> None:
    """Check that the engine's processes hold no more than after a successful update."""
    assert engine.host_pid is not None
    ends = time.monotonic() + SLACK_S
    while more := HostHoldings.of(engine.host_pid).more_than(baseline):
        assert time.monotonic() < ends, f"the engine's processes hold more than before: {'; '.join(more)}"
        await asyncio.sleep(0.05)


async def _long_answer(engine: InferenceEngine) -> GenerationOutput:
    return await engine.generate("in flight", SamplingParams(max_new_tokens=150, ignore_eos=True, temperature=0))


@asynccontextmanager
async def _desk(job: Job, engine: InferenceEngine | None, theatre: Theatre) -> AsyncGenerator[Desk, None]:
    """Run a sender's process; it is killed at the end of the block if it is still alive."""
    desk = await Desk.open(job, engine, patience=theatre.bound)
    try:
        yield desk
    finally:
        desk.kill()
        await desk.hang_up()
        await desk.ended()


# A trainer that has the engine ----------------------------------------------------------------------------------------


async def _play_trainer(fault: Fault, theatre: Theatre, temporary: Path) -> None:
    job = Job(theatre.model, fault.transport, temporary, own=theatre.fields)
    async with _desk(job, None, theatre) as trainer:
        family: list[psutil.Process] = []
        if trainer.host_pid is not None:
            family = family_of(trainer.host_pid)
        own = "initial"
        if fault.point.step != "Join":
            own = theatre.version()
            _check_success(await trainer.push(own))
        new = theatre.version()
        theatre.stage.plan(fault, trainer.process.pid, 0)
        thawing = asyncio.create_task(_thaw_trainer(fault, theatre))
        report, told = await _pushed(fault, trainer, new, theatre)
        assert theatre.stage.struck, f"nobody came to {fault.point}"
        await thawing
        if report is None:
            theatre.note(fault, told, "ended with its trainer")
            assert not (fault.blow is Blow.FREEZE and any(not runs(process) for process in family))
            trainer.kill()
        else:
            theatre.note(fault, told, _check_own(report, theatre, own, new))
            last = theatre.version()
            mended = await trainer.push(last)
            _check_success(mended)
            assert _check_own(mended, theatre, last, last) == "ready, new"
            await trainer.close(theatre.bound)
        assert gone(family, within=SLACK_S), f"of the engine's processes these are left: {family}"
    if fault.transport == "disk" and report is None:
        # The next trainer that makes its folder beside it removes what a killed trainer left.
        sender = DiskSender()
        sender.begin(WeightPlan(()))
        sender.close()


async def _thaw_trainer(fault: Fault, theatre: Theatre) -> None:
    if fault.blow not in (Blow.PAUSE, Blow.RETURN):
        return
    await _struck(theatre)
    # Thaw late: after its own deadlines, and those of everyone who waits for it.
    late = theatre.fields["timeouts"]["weight_update"] + 1
    await asyncio.sleep(PAUSE_S if fault.blow is Blow.PAUSE else late)
    os.kill(theatre.stage.victim, signal.SIGCONT)


def _check_own(report: Report, theatre: Theatre, own: str, new: str) -> str:
    """Check that a trainer's report of its own engine can be true; return the engine's condition in a word."""
    assert not report.bare, report.bare
    if report.state == "ready":
        assert report.served in _possible(theatre, own, new)
        assert not report.wrong, f"{report.served!r} is claimed, but these are not of it: {report.wrong}"
        assert (report.error is None) == (report.served == new)
        return "ready, new" if report.served == new else "ready, old"
    assert report.error is not None
    assert report.state.startswith("dirty ("), report.state
    assert report.served == own
    return "dirty"
