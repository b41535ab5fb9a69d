"""Fleets for tests: engines of this process, of host processes and of other owners, and calls that fail on one."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch

from drivetrain import DeadlineExceeded, InferenceEngine, SamplingParams, attach, create_engine
from drivetrain.process.shared_engine import SharedEngine
from drivetrain_conformance.harness.time_limits import within
from drivetrain_fleet import Health, InferenceEngineClient, MemberReport
from drivetrain_fleet.backend import FleetBackend
from drivetrain_fleet.members import Member
from warm_python import Program, running

_T = TypeVar("_T")

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
BOUND = 60.0

OWNER = """
import asyncio, base64, pickle, sys, torch
from drivetrain import create_engine
torch.set_num_threads(1)

async def main():
    async with create_engine("transformers", model=sys.argv[1], isolation="inline") as engine:
        print(base64.b64encode(pickle.dumps(await engine.handle())).decode(), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def local(model: Path, **fields: object) -> InferenceEngine:
    """Make an engine, not started."""
    return create_engine({"backend": "transformers", "model": str(model), "isolation": "inline", **fields})


@asynccontextmanager
async def fleet_of(engines: int | list[InferenceEngine], model: Path, **options: object) -> AsyncIterator[Fleet]:
    """Open a fleet of engines of this process, or of given ones."""
    made = [local(model) for _ in range(engines)] if isinstance(engines, int) else engines
    fleet = Fleet(made, **options)  # type: ignore[arg-type]
    async with fleet:
        yield fleet


class Fleet(InferenceEngineClient):
    """A fleet whose members a test can look at."""

    @property
    def backend(self) -> FleetBackend:
        backend = self.parts.backend
        assert isinstance(backend, FleetBackend)
        return backend

    def member(self, name: str) -> Member:
        """Return a member by name."""
        found = self.backend.members.find(name)
        assert found is not None
        return found

    def report(self, name: str) -> MemberReport:
        """Return what is shown of a member."""
        return next(one for one in self.members if one.name == name)

    def begun(self, name: str) -> int:
        """Return how many samples a member has that have a token."""
        return sum(ticket.made > 0 for ticket in self.backend.sending.of(self.member(name)))

    def health(self) -> list[str]:
        """Return the health of each member."""
        return [one.health.value for one in self.members]


class Spoiled:
    """Calls of a member, of which some fail or wait."""

    def __init__(self, calls: SharedEngine, **instead: Callable[..., Awaitable[object]]) -> None:
        self.calls = calls
        self.instead = instead
        self.made: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.made.append(name)
        return self.instead.get(name) or getattr(self.calls, name)


@contextmanager
def answer_lost(member: Member, name: str) -> Iterator[None]:
    """Let a call of this name do its work on one member, and lose the answer."""
    calls = member.calls

    async def lose(*arguments: object) -> object:
        await getattr(calls, name)(*arguments)
        raise DeadlineExceeded(f"waited for {name}")

    member.calls = cast(SharedEngine, Spoiled(calls, **{name: lose}))
    try:
        yield
    finally:
        member.calls = calls


@contextmanager
def spoiled(member: Member, **errors: BaseException) -> Iterator[Spoiled]:
    """Let calls of these names raise on one member."""

    def failing(error: BaseException) -> Callable[..., Awaitable[object]]:
        async def fail(*arguments: object) -> object:
            raise error

        return fail

    calls = member.calls
    stand_in = Spoiled(calls, **{name: failing(error) for name, error in errors.items()})
    member.calls = cast(SharedEngine, stand_in)
    try:
        yield stand_in
    finally:
        member.calls = calls


@asynccontextmanager
async def owned_elsewhere(model: Path) -> AsyncIterator[tuple[InferenceEngine, Program]]:
    """Attach to an engine that another process owns; yield it and the process."""
    async with running("-c", OWNER, str(model)) as process:
        yield await attach(pickle.loads(base64.b64decode(await process.stdout.readline()))), process


def kill_host(engine: InferenceEngine, number: int = signal.SIGKILL) -> None:
    """Send a signal to an engine's host process."""
    assert engine.host_pid is not None
    os.kill(engine.host_pid, number)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with within(seconds=BOUND):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def paused_in_flight(
    fleet: Fleet, start: Callable[[], list[asyncio.Task[_T]]], samples: int, name: str
) -> list[asyncio.Task[_T]]:
    """Start requests, and pause a member while so many of them have tokens there and cannot end; return the requests.

    On a busy machine the first may end before the last begins: then they are started again.
    """
    engine = fleet.member(name).engine
    async with within(seconds=BOUND):
        while True:
            tasks = start()
            await until(lambda: fleet.begun(name) == samples or any(task.done() for task in tasks))  # noqa: B023
            await engine.pause_generation("in_place")
            if fleet.begun(name) == samples:
                return tasks
            await engine.continue_generation()
            await asyncio.gather(*tasks)


async def until_health(fleet: Fleet, name: str, health: Health) -> None:
    """Wait until a member has this health."""
    await until(lambda: fleet.report(name).health is health)


async def tensors_for(engine: InferenceEngine) -> dict[str, torch.Tensor]:
    """Return random weights for an engine."""
    manifest = await engine.weight_manifest()
    return {
        spec.name: torch.randn(spec.shape, dtype=getattr(torch, spec.dtype)).mul_(0.05) for spec in manifest.tensors
    }
