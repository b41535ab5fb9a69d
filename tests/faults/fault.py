"""What can happen to a weight update: who is struck, at which point of the protocol, and how."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil
from hypothesis import strategies as st


class Victim(Enum):
    """Which process is struck."""

    SENDER = "sender"
    """It has the weights; the engine is another process's."""
    TRAINER = "trainer"
    """It has the weights and the engine."""
    HOST = "host"
    """The engine's host process."""
    CORE = "core"
    """The process of the engine that its ranks take their orders from."""
    RANK_0 = "rank 0"
    RANK_1 = "rank 1"


class Blow(Enum):
    """How it is struck."""

    KILL = "killed"
    FREEZE = "frozen"
    """For good."""
    PAUSE = "frozen, thawed soon"
    """Before anybody's deadline."""
    RETURN = "frozen, thawed late"
    """When everybody has given it up, and another has taken its place."""
    RAISE = "an exception"
    """No signal: the step itself fails."""

    @property
    def signal(self) -> int:
        """What is sent; 0 for none."""
        if self is Blow.RAISE:
            return 0
        return signal.SIGKILL if self is Blow.KILL else signal.SIGSTOP


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the protocol, as a process comes to it."""

    step: str
    moment: str
    bucket: int = -1

    def __str__(self) -> str:
        return f"{self.moment} {self.step}" + (f" of bucket {self.bucket}" if self.bucket >= 0 else "")


BUCKETS = 4
"""In which the weights of these tests travel."""
STAGE = [Point("Stage", "before"), Point("Stage", "after")]
JOIN = [Point("Join", "before"), Point("Join", "after")]
UPDATE = [
    *(Point(step, moment) for step in ("PrepareUpdate", "BeginUpdate") for moment in ("before", "after")),
    *(Point("LoadBuckets", moment, index) for index in range(BUCKETS) for moment in ("before", "within", "after")),
    *(Point("VerifyUpdate", moment) for moment in ("before", "within", "after")),
    *(Point("CommitUpdate", moment) for moment in ("before", "after")),
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens."""

    victim: Victim
    blow: Blow
    transport: str
    point: Point
    in_flight: bool
    """Whether a request is being answered meanwhile."""


def faults(victims: Sequence[Victim], blows: Sequence[Blow], transports: Sequence[str]) -> st.SearchStrategy[Fault]:
    """Every fault of these kinds. Transport, victim, blow and step are each as likely as any other."""

    def of(transport: str, victim: Victim, blow: Blow) -> st.SearchStrategy[Fault]:
        before = [] if blow is Blow.RAISE else [*STAGE, *(JOIN if transport == "broadcast" else [])]
        points = [*before, *UPDATE]
        if transport == "in_process":  # all buckets go in one call
            points = [point for point in points if point.bucket <= 0]
        steps = list(dict.fromkeys(point.step for point in points))
        at = st.sampled_from(steps).flatmap(lambda step: st.sampled_from([p for p in points if p.step == step]))
        return st.builds(Fault, st.just(victim), st.just(blow), st.just(transport), at, st.booleans())

    drawn = st.tuples(st.sampled_from(transports), st.sampled_from(victims), st.sampled_from(blows))
    return drawn.flatmap(lambda of_one: of(*of_one))


class Stage:
    """The folder through which points are planned and seen to be passed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plan(self, fault: Fault, pid: int, rank: int) -> None:
        """Let process ``pid`` be struck when this rank comes to the point; 0: that rank itself."""
        self.clear()
        point = [fault.point.step, fault.point.moment, fault.point.bucket, rank]
        draft = self.folder / "draft"
        draft.write_text(json.dumps({"point": point, "pid": pid, "signal": fault.blow.signal}))
        draft.rename(self.folder / "plan")

    def clear(self) -> None:
        """Forget what was planned and passed."""
        for name in ("plan", "victim", "struck", "passed"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def struck(self) -> bool:
        """Whether the blow was struck."""
        return (self.folder / "struck").exists()

    @property
    def victim(self) -> int:
        """The process that was struck."""
        return int((self.folder / "victim").read_text())

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that took part in an update."""
        return {rank: pid for pid, rank, point in self._passed() if point[0] == "PrepareUpdate"}

    def passed(self, step: str, moment: str) -> set[int]:
        """The ranks that have passed a point."""
        return {rank for _, rank, point in self._passed() if point[:2] == [step, moment]}

    def _passed(self) -> list[tuple[int, int, list[str]]]:
        file = self.folder / "passed"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(pid), int(rank), point) for pid, rank, *point in lines]


def runs(process: psutil.Process) -> bool:
    """What was orphaned and killed is for the system's first process to bury; until then it is a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(processes: Sequence[psutil.Process], within: float) -> bool:
    """Whether they all end in time."""
    ends = time.monotonic() + within
    while any(map(runs, processes)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True
