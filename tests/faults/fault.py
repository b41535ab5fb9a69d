"""Faults during a weight update: the process struck, the point of the protocol, and the kind of blow."""

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

from drivetrain.process.process_tree import runs


class Victim(Enum):
    """The process that is struck."""

    SENDER = "sender"
    """Has the weights; another process owns the engine."""
    TRAINER = "trainer"
    """Has the weights and the engine."""
    HOST = "host"
    """The engine's host process."""
    CORE = "core"
    """The engine's process that commands its ranks."""
    RANK_0 = "rank 0"
    RANK_1 = "rank 1"


class Blow(Enum):
    """The way in which a process is struck."""

    KILL = "killed"
    FREEZE = "frozen"
    """Frozen for good."""
    PAUSE = "frozen, thawed soon"
    """Thawed before any deadline."""
    RETURN = "frozen, thawed late"
    """Thawed after everyone has given it up and another has taken its place."""
    RAISE = "an exception"
    """No signal: the step itself raises."""

    @property
    def signal(self) -> int:
        """The signal that is sent; 0 for none."""
        if self is Blow.RAISE:
            return 0
        return signal.SIGKILL if self is Blow.KILL else signal.SIGSTOP


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the protocol that a process reaches."""

    step: str
    moment: str
    bucket: int = -1

    def __str__(self) -> str:
        return f"{self.moment} {self.step}" + (f" of bucket {self.bucket}" if self.bucket >= 0 else "")


BUCKETS = 4
"""Number of buckets in these tests' updates."""
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
    """One fault."""

    victim: Victim
    blow: Blow
    transport: str
    point: Point
    in_flight: bool
    """A request is being answered meanwhile."""


def faults(victims: Sequence[Victim], blows: Sequence[Blow], transports: Sequence[str]) -> st.SearchStrategy[Fault]:
    """Draw a fault of these kinds; transports, victims, blows and steps are equally likely each."""

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
    """The folder in which faults are planned and passed points are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plan(self, fault: Fault, pid: int, rank: int) -> None:
        """Plan to strike process ``pid`` when this rank reaches the point; 0: the rank's own process."""
        self.clear()
        point = [fault.point.step, fault.point.moment, fault.point.bucket, rank]
        draft = self.folder / "draft"
        draft.write_text(json.dumps({"point": point, "pid": pid, "signal": fault.blow.signal}))
        draft.rename(self.folder / "plan")

    def clear(self) -> None:
        """Forget planned faults and passed points."""
        for name in ("plan", "victim", "struck", "passed"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def struck(self) -> bool:
        """True once the blow was struck."""
        return (self.folder / "struck").exists()

    @property
    def victim(self) -> int:
        """Pid of the process that was struck."""
        return int((self.folder / "victim").read_text())

    @property
    def pids(self) -> dict[int, int]:
        """Pid of each rank that took part in an update."""
        return {rank: pid for pid, rank, point in self._passed() if point[0] == "PrepareUpdate"}

    def passed(self, step: str, moment: str) -> set[int]:
        """Return the ranks that have passed a point."""
        return {rank for _, rank, point in self._passed() if point[:2] == [step, moment]}

    def _passed(self) -> list[tuple[int, int, list[str]]]:
        file = self.folder / "passed"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(pid), int(rank), point) for pid, rank, *point in lines]


def gone(processes: Sequence[psutil.Process], within: float) -> bool:
    """Return True if all processes end in time."""
    ends = time.monotonic() + within
    while any(map(runs, processes)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True
