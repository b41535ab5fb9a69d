"""Strike what a fleet depends on, at each moment of its work, and write a table of what its clients got.

    PYTHONPATH=tests/helpers python tests/faults/on_a_fleet.py --backend transformers --output FILE

Clients ask a fleet of three engines for completions, whole and streamed, one after another. Then a process is killed or
frozen, or a network is cut: that of one engine, of a holder of the fleet's handle, or of the fleet itself. After the
blow the fleet is mended as its owner would mend it, by a push of new weights. Exit status 1: a rule was broken.

- Every request ends in a completion or in an error of ``drivetrain.errors``.
- Every token carries a weight version that was committed.
- A request that begins after the mending push is answered with its version, and none fails.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import functools
import itertools
import os
import pickle
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch

from drivetrain import (
    Capability,
    DrivetrainError,
    EngineHandle,
    EngineState,
    InferenceEngine,
    MemoryTag,
    PauseMode,
    SamplingParams,
    WeightUpdateRequest,
    attach,
    create_engine,
)
from drivetrain.process.shared_engine import SharedEngine
from drivetrain.testing import tiny_model
from drivetrain.types.weights import DiskSource
from drivetrain_conformance.harness.fork_server import ForkServer
from drivetrain_conformance.harness.remote_suite import Host
from drivetrain_fleet import Health, InferenceEngineClient
from drivetrain_weight_sync import WeightSync
from fleets import Fleet, tensors_for, until
from links import Relay

CLIENTS: Final = 6
HEARTBEAT_S: Final = 3.0
TIMEOUTS: Final = {"heartbeat": HEARTBEAT_S, "control": 20.0, "weight_update": 20.0}
BOUND_S: Final = 60.0
"""Seconds after which a request counts as one that never ends."""
SHORT_S: Final = 0.5
"""Seconds of a blow that is taken back before anybody's deadline."""
LENGTHS: Final = (8, 30, 120)
ENDLESS: Final = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
NEW: Final = "one"
AFTER: Final = "after"
STRUCK: Final = "struck"
KILLED: Final = "killed"
FROZEN: Final = "frozen"
THAWED: Final = f"frozen for {SHORT_S} s"
THAWED_LATE: Final = "frozen until it was given up"
CUT: Final = "cut"
MENDED: Final = f"cut for {SHORT_S} s"
MENDED_LATE: Final = "cut until it was given up"
UNHARMED: Final = "-"


# Requests of clients ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """One request of a client."""

    begun: float
    ended: float | None = None
    error: str = ""
    versions: frozenset[str] = frozenset()


class Clients:
    """Clients of engine pages, each of which asks for one completion after another."""

    def __init__(self, pages: Sequence[InferenceEngine]) -> None:
        self.requests: list[Request] = []
        self._over = False
        self._tasks = [asyncio.create_task(self._ask(pages[i % len(pages)], i)) for i in range(CLIENTS)]

    async def _ask(self, page: InferenceEngine, number: int) -> None:
        for turn in itertools.count():
            if self._over:
                return
            params = SamplingParams(
                max_new_tokens=LENGTHS[(number + turn) % len(LENGTHS)], temperature=0.0, ignore_eos=True
            )
            request = Request(time.monotonic())
            self.requests.append(request)
            try:
                request.versions = await _completed(page, [number + 1, turn % 200], params, streamed=number % 2 == 1)
            except DrivetrainError as error:
                request.error = type(error).__name__
                await asyncio.sleep(0.05)
            request.ended = time.monotonic()

    async def stop(self) -> None:
        """Let every client end its last request; one that doesn't within the bound is cancelled and counted."""
        self._over = True
        _, unended = await asyncio.wait(self._tasks, timeout=BOUND_S)
        for task in unended:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


async def _completed(
    page: InferenceEngine, prompt: list[int], params: SamplingParams, *, streamed: bool
) -> frozenset[str]:
    """Ask for one completion; return the weight versions of its tokens."""
    if streamed:
        chunks = [chunk async for chunk in page.generate_stream(prompt, params)]
        completions = [chunk.completion for chunk in chunks if chunk.completion is not None]
    else:
        completions = (await page.generate([prompt], params)).completions
    return frozenset(span.version for completion in completions for span in completion.weight_versions)


# Engines and holders that are struck ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blow:
    """One way to strike."""

    name: str
    strike: Callable[[], None]
    relent: Callable[[], None] | None = None
    """Takes the blow back; None: nothing does."""
    late: bool = False
    """True: it is taken back once the victim counts as lost; False: after :data:`SHORT_S`."""

    @property
    def loses(self) -> bool:
        """True if the victim must be lost."""
        return self.relent is None or self.late


def to_process(pid: int) -> dict[str, Blow]:
    """Return the blows that a process can be dealt, by name."""

    def send(number: signal.Signals) -> Callable[[], None]:
        return lambda: os.kill(pid, number)

    return _by_name(
        Blow(KILLED, send(signal.SIGKILL)),
        Blow(FROZEN, send(signal.SIGSTOP)),
        Blow(THAWED, send(signal.SIGSTOP), send(signal.SIGCONT)),
        Blow(THAWED_LATE, send(signal.SIGSTOP), send(signal.SIGCONT), late=True),
    )


def to_network(link: Relay) -> dict[str, Blow]:
    """Return the blows that a network can be dealt, by name."""
    return _by_name(
        Blow(CUT, link.cut),
        Blow(MENDED, link.cut, link.mend),
        Blow(MENDED_LATE, link.cut, link.mend, late=True),
    )


def _by_name(*blows: Blow) -> dict[str, Blow]:
    return {blow.name: blow for blow in blows}


class Striker:
    """Deals a blow once, and remembers when."""

    def __init__(self, blow: Blow) -> None:
        self.blow = blow
        self.at = 0.0

    def strike(self) -> None:
        """Deal the blow; later calls do nothing."""
        if not self.at:
            self.at = time.monotonic()
            self.blow.strike()
            if self.blow.relent is not None and not self.blow.late:
                asyncio.get_running_loop().call_later(SHORT_S, self.blow.relent)

    async def relent_late(self) -> None:
        """Take the blow back now, if it is one for that; the victim has some time to do harm."""
        if self.blow.relent is not None and self.blow.late:
            self.blow.relent()
            await asyncio.sleep(2 * SHORT_S)


class StruckFirst:
    """Calls of a fleet's member, whose process is struck just before one of them is made."""

    def __init__(self, calls: SharedEngine, name: str, strike: Callable[[], None]) -> None:
        self._calls = calls
        self._name = name
        self._strike = strike

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            self._strike()
        return getattr(self._calls, name)


# When -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a fleet's work, at which one of its engines is struck."""

    name: str
    call: str
    """Call of the engine before which it is struck; empty: at once, or where ``change`` says so."""
    needs: frozenset[Capability]
    change: Callable[[Fleet, Path, Callable[[], None]], Awaitable[object]]
    """Changes the fleet; may strike."""


async def _nothing(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    strike()


async def _push(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    await push(fleet, NEW)


async def _by_hand(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    async with fleet.weight_update(WeightUpdateRequest(version=NEW, source=DiskSource(path=str(model)))) as update:
        for index in range(update.buckets):
            await update.load([index])


async def _pause(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    await fleet.pause_generation(PauseMode.IN_PLACE)
    await fleet.continue_generation()


async def _paused(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    await fleet.pause_generation(PauseMode.IN_PLACE)
    strike()
    await asyncio.sleep(2 * SHORT_S)
    await fleet.continue_generation()


async def _asleep(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    await fleet.pause_generation(PauseMode.RETRACT)
    await fleet.sleep([MemoryTag.KV_CACHE])
    strike()
    await asyncio.sleep(2 * SHORT_S)
    await fleet.wake_up()
    await fleet.continue_generation()


async def _relabel(fleet: Fleet, model: Path, strike: Callable[[], None]) -> None:
    await fleet.update_weight_version(NEW)


WEIGHTS: Final = frozenset({Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK})
PAUSE: Final = frozenset({Capability.PAUSE_IN_PLACE})
MOMENTS: Final = (
    Moment("generating", "", frozenset(), _nothing),
    Moment("pausing", "pause_generation", PAUSE, _pause),
    Moment("paused", "", PAUSE, _paused),
    Moment("relabelling", "update_weight_version", frozenset(), _relabel),
    Moment("staging a push", "prepare_weight_update", WEIGHTS, _push),
    Moment("applying a push", "apply_update", WEIGHTS, _push),
    Moment("loading a bucket", "load_buckets", WEIGHTS, _by_hand),
    Moment("committing", "commit_update", WEIGHTS, _by_hand),
    Moment("asleep", "", frozenset({Capability.PAUSE_RETRACT, Capability.SLEEP_KV_CACHE}), _asleep),
)


async def push(engine: InferenceEngine, version: str) -> None:
    """Push random weights; an engine without weights is relabelled."""
    if engine.capabilities >= WEIGHTS:
        async with WeightSync.connect(await tensors_for(engine), engine, "shared_memory") as sync:
            await sync.push(version=version)
    else:
        await engine.update_weight_version(version)


# Rows of the table --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """One fault at one moment, and what came of it."""

    struck: str
    blow: str
    moment: str
    change: str
    """How the change ended that was under way."""
    requests: int
    completed: int
    errors: Counter[str]
    unended: int
    longest_s: float
    """Longest wait of a request from the blow, or from its begin if that was later, to its end."""
    versions: list[str]
    """Versions of the tokens that were made before the mending push."""
    afterwards: list[str]
    """Those of requests that began after it."""
    engines: str
    """Health of the engines before the mending push."""
    broken: list[str] = field(default_factory=list)
    """Rules that did not hold."""

    def cells(self) -> list[str]:
        """Return the row's cells as texts."""
        errors = ", ".join(f"{number} {name}" for name, number in sorted(self.errors.items()))
        return [
            self.struck,
            self.blow,
            self.moment,
            str(self.requests),
            str(self.completed),
            errors or "-",
            str(self.unended),
            f"{self.longest_s:.1f}",
            self.change,
            self.engines,
            ", ".join(self.versions),
            ", ".join(self.afterwards),
        ]


HEADS: Final = (
    "struck",
    "how",
    "while",
    "requests",
    "completed",
    "typed errors",
    "never ended",
    "longest wait, s",
    "the change under way",
    "engines",
    "versions served",
    "after a push",
)


def row_of(
    clients: Clients,
    names: tuple[str, str, str],
    change: str,
    engines: str,
    at: float,
    mended: float,
    committed: set[str],
) -> Row:
    """Make a row of what clients saw.

    Args:
        clients: The clients, which have stopped.
        names: The victim, the blow and the moment.
        change: The outcome of the change under way.
        engines: Health of the engines before the mending push.
        at: Time of the blow.
        mended: Time at which the mending push ended.
        committed: Versions that were committed before it.
    """
    requests = [one for one in clients.requests if one.ended is None or one.ended >= at]
    ended = [one for one in requests if one.ended is not None]
    before = {version for one in requests if one.begun < mended for version in one.versions}
    late = [one for one in requests if one.begun >= mended]
    afterwards = {version for one in late for version in one.versions}
    row = Row(
        *names,
        change=change,
        requests=len(requests),
        completed=sum(not one.error for one in ended),
        errors=Counter(one.error for one in ended if one.error),
        unended=len(requests) - len(ended),
        longest_s=max(((one.ended or 0.0) - max(one.begun, at) for one in ended), default=0.0),
        versions=sorted(before),
        afterwards=sorted(afterwards),
        engines=engines,
    )
    if row.unended:
        row.broken.append(f"{row.unended} requests never ended")
    if not before <= committed | {AFTER}:
        row.broken.append(f"served {sorted(before - committed - {AFTER})}, which was never committed")
    if afterwards != {AFTER}:
        row.broken.append(f"served {sorted(afterwards)} after the push of {AFTER!r}")
    if errors := {one.error for one in late if one.error}:
        row.broken.append(f"refused requests after the push: {sorted(errors)}")
    return row


async def until_asked(clients: Clients, begun: float) -> None:
    """Wait until each client has had an answer to a request that began after a time."""
    await until(lambda: sum(one.begun >= begun and one.ended is not None for one in clients.requests) >= CLIENTS)


def outcome(results: Iterable[BaseException | object]) -> str:
    """Say how a change ended."""
    (result,) = results
    if isinstance(result, BaseException):
        if not isinstance(result, DrivetrainError):
            raise result
        return type(result).__name__
    return "done"


# An engine is struck ---------------------------------------------------------------------------------------------


class Lab:
    """The backend, model and fork server of a run."""

    def __init__(self, backend: str, model: Path, forks: ForkServer) -> None:
        self.backend = backend
        self.model = model
        self.forks = forks

    def fields(self, **more: object) -> dict[str, object]:
        """Return the fields of an engine."""
        return {"backend": self.backend, "model": str(self.model), "timeouts": dict(TIMEOUTS), **more}

    def local(self, **more: object) -> InferenceEngine:
        """Make an engine of this process, not started."""
        return create_engine(self.fields(**{"isolation": "inline", **more}))

    async def host(self) -> Host:
        """Start a ``drivetrain host``."""
        return await asyncio.to_thread(Host, self.fields(isolation="inline"), self.forks)


@asynccontextmanager
async def unharmed(lab: Lab) -> AsyncIterator[tuple[InferenceEngine, Callable[[], dict[str, Blow]]]]:
    """Make an engine in a host process to which nothing happens: how long requests wait without a fault."""
    yield lab.local(isolation="process"), lambda: _by_name(Blow(UNHARMED, lambda: None, lambda: None))


@asynccontextmanager
async def in_host_process(lab: Lab) -> AsyncIterator[tuple[InferenceEngine, Callable[[], dict[str, Blow]]]]:
    """Make an engine in a host process of its own."""
    engine = lab.local(isolation="process")
    yield engine, lambda: to_process(cast(int, engine.host_pid))


@asynccontextmanager
async def of_another_owner(lab: Lab) -> AsyncIterator[tuple[InferenceEngine, Callable[[], dict[str, Blow]]]]:
    """Make the page of an engine that ``drivetrain host`` owns."""
    host = await lab.host()
    try:
        page = await asyncio.to_thread(create_engine, "remote", endpoint=host.endpoint, key=host.key)
        yield page, lambda: to_process(host.pid)
    finally:
        await asyncio.to_thread(host.stop)


@asynccontextmanager
async def across_a_network(lab: Lab) -> AsyncIterator[tuple[InferenceEngine, Callable[[], dict[str, Blow]]]]:
    """Make the page of an engine behind a network that can be cut."""
    host, link = await lab.host(), Relay()
    try:
        near = await link.near(host.endpoint)
        page = await asyncio.to_thread(create_engine, "remote", endpoint=near, key=host.key)
        yield page, lambda: to_network(link)
    finally:
        link.mend()
        link.server.close()
        await asyncio.to_thread(host.stop)


@asynccontextmanager
async def in_ray_actor(lab: Lab) -> AsyncIterator[tuple[InferenceEngine, Callable[[], dict[str, Blow]]]]:
    """Attach to an engine in a Ray actor."""
    import ray

    from drivetrain_fleet.ray import start_engines

    if not ray.is_initialized():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    async with await start_engines(lab.fields(isolation="inline", device="cpu"), 1, max_restarts=0) as engines:
        (engine,) = engines
        actor: Any = engine.actor
        pid = (await actor.placement.remote())[1]
        yield await engine.attach(), lambda: to_process(pid)


NOTHING: Final = "nothing"
NETWORK: Final = "the network to an engine"
RAY: Final = "an engine's Ray actor"
OWNER: Final = "the owner of a remote engine"
HOWS: Final = {
    NOTHING: (UNHARMED,),
    OWNER: (KILLED, FROZEN, THAWED, THAWED_LATE),
    NETWORK: (CUT, MENDED, MENDED_LATE),
    RAY: (KILLED, FROZEN),
}
"""Blows of the places that are not struck as a host process is, which its engine kills when it is given up."""
Place = Callable[[Lab], AbstractAsyncContextManager[tuple[InferenceEngine, Callable[[], dict[str, Blow]]]]]
PLACES: Final[dict[str, Place]] = {
    NOTHING: unharmed,
    "an engine's host process": in_host_process,
    OWNER: of_another_owner,
    NETWORK: across_a_network,
    RAY: in_ray_actor,
}


async def strike_an_engine(lab: Lab, name: str, how: str, moment: Moment) -> Row:
    """Strike one of a fleet's three engines."""
    async with AsyncExitStack() as stack:
        engine, blows = await stack.enter_async_context(PLACES[name](lab))
        fleet = Fleet({"first": lab.local(), STRUCK: engine, "last": lab.local()})
        await stack.enter_async_context(fleet)
        blow = blows()[how]
        striker, member = Striker(blow), fleet.member(STRUCK)
        clients = Clients([fleet])
        await until(lambda: fleet.begun(STRUCK) >= 2)
        if moment.call:
            member.calls = cast(SharedEngine, StruckFirst(member.calls, moment.call, striker.strike))
        change = outcome(await asyncio.gather(moment.change(fleet, lab.model, striker.strike), return_exceptions=True))
        assert striker.at, f"{moment.name} did not come to {moment.call}"
        committed = {"initial", fleet.get_weight_version()}
        if blow.loses:
            await until(lambda: fleet.report(STRUCK).health is Health.FAILED)
            await striker.relent_late()
        else:
            await asyncio.sleep(2 * SHORT_S)
        engines = ", ".join(fleet.health())
        await push(fleet, AFTER)
        mended = time.monotonic()
        await until_asked(clients, mended)
        await clients.stop()
        return row_of(clients, (name, blow.name, moment.name), change, engines, striker.at, mended, committed)


# A holder, or the fleet itself, is struck ----------------------------------------------------------------------------


HOLDING: Final = {
    "generating": frozenset[Capability](),
    "paused": PAUSE,
    "staging a push": WEIGHTS,
    "loading a bucket": WEIGHTS,
    "asleep": frozenset({Capability.PAUSE_RETRACT, Capability.SLEEP_KV_CACHE}),
}
"""Moments at which a process with a handle is struck, and the capabilities that its engines must claim."""


async def hold(moment: str, model: str, given: str) -> None:
    """In a process of its own: attach to engines, go as far as the moment, say so, and wait for the blow and its end.

    With one handle the process is its holder, with several it is the fleet of these engines.
    """
    torch.set_num_threads(1)
    pages = [await attach(handle) for handle in pickle.loads(base64.b64decode(given))]
    engine: InferenceEngine = pages[0]
    if len(pages) > 1:
        engine = InferenceEngineClient(pages)
        await engine.start()
    streams = [engine.generate_stream([i + 1, 2], ENDLESS) for i in range(4)]
    for stream in streams:
        await anext(aiter(stream))
    request = WeightUpdateRequest(version="held", source=DiskSource(path=model))
    async with AsyncExitStack() as stack:
        match moment:
            case "paused":
                await engine.pause_generation(PauseMode.IN_PLACE)
            case "asleep":
                await engine.pause_generation(PauseMode.RETRACT)  # others have requests, too
                await engine.sleep([MemoryTag.KV_CACHE])
            case "staging a push":
                await engine.prepare_weight_update(request)
            case "loading a bucket":
                update = await stack.enter_async_context(engine.weight_update(request))
                await update.load([0])
        thawed = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, thawed.set)
        print("ready", flush=True)
        await thawed.wait()
        # Long given up, the process goes on with what it was at: it leaves the update by committing it.
        if moment == "asleep":
            await engine.wake_up()
        if moment in ("asleep", "paused"):
            await engine.continue_generation()


@asynccontextmanager
async def holding(lab: Lab, moment: str, handles: Sequence[EngineHandle]) -> AsyncIterator[int]:
    """Start such a process; yield its pid once it is as far as the moment."""
    given = base64.b64encode(pickle.dumps(handles)).decode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--hold", moment, str(lab.model), given), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line.strip() == b"ready", line
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def strike_a_holder(lab: Lab, how: str, moment: str) -> Row:
    """Strike a process that holds the handle of a fleet of two engines, which serves this process's clients."""
    async with Fleet({"first": lab.local(), "last": lab.local()}) as fleet:
        clients = Clients([fleet])
        async with holding(lab, moment, [await fleet.handle()]) as pid:
            return await _struck(lab, clients, [fleet], ("a holder of the fleet", moment), to_process(pid)[how])


async def strike_the_fleet(lab: Lab, how: str, moment: str) -> Row:
    """Strike the process of a fleet of two engines of other owners, which also serve this process's clients."""
    async with AsyncExitStack() as stack:
        handles, pages = [], []
        for _ in range(2):
            host = await lab.host()
            stack.push_async_callback(asyncio.to_thread, host.stop)
            handles.append(EngineHandle(host.endpoint, host.key))
            pages.append(await attach(handles[-1]))
            stack.push_async_callback(pages[-1].teardown)
        clients = Clients(pages)
        async with holding(lab, moment, handles) as pid:
            return await _struck(lab, clients, pages, ("the fleet's own process", moment), to_process(pid)[how])


async def _struck(
    lab: Lab, clients: Clients, pages: Sequence[InferenceEngine], names: tuple[str, str], blow: Blow
) -> Row:
    """Strike a process that is in the middle of something, wait for its heartbeat to lapse, and mend its engines."""
    striker = Striker(blow)
    striker.strike()
    await asyncio.sleep(HEARTBEAT_S + 2)
    await striker.relent_late()
    committed = {page.get_weight_version() for page in pages}
    engines = ", ".join(page.state.value for page in pages)
    for page in pages:
        if page.state is EngineState.ASLEEP:
            await page.wake_up()
        await push(page, AFTER)
    mended = time.monotonic()
    await until_asked(clients, mended)
    await clients.stop()
    what, moment = names
    return row_of(clients, (what, blow.name, moment), "-", engines, striker.at, mended, committed)


# The run --------------------------------------------------------------------------------------------------------------

HOLDERS: Final = {"a holder of the fleet": strike_a_holder, "the fleet's own process": strike_the_fleet}


def plan(lab: Lab, chosen: Sequence[str], hows: Sequence[str]) -> list[Callable[[], Coroutine[object, object, Row]]]:
    """Return each fault that this backend's engines can be dealt.

    Args:
        lab: The maker of the engines.
        chosen: Names of the victims; empty: all.
        hows: How; empty: in every way.
    """
    claimed = lab.local().capabilities
    places = [place for place in PLACES if place != RAY or find_spec("ray")]
    found: list[tuple[str, str, Callable[[], Coroutine[object, object, Row]]]] = [
        (place, how, functools.partial(strike_an_engine, lab, place, how, moment))
        for place in places
        for moment in MOMENTS
        for how in HOWS.get(place, (KILLED, FROZEN, THAWED))
        if moment.needs <= claimed
    ]
    found += [
        (what, how, functools.partial(strike, lab, how, moment))
        for what, strike in HOLDERS.items()
        for moment, needs in HOLDING.items()
        for how in (KILLED, FROZEN, THAWED_LATE)
        if needs <= claimed
    ]
    return [fault for what, how, fault in found if what in (chosen or [what]) and how in (hows or [how])]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines of a Markdown table."""
    cells = [list(HEADS), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def summary(rows: Sequence[Row]) -> str:
    """Say in one line what came of all faults."""
    errors = sum((row.errors for row in rows), Counter[str]())
    named = ", ".join(f"{number} {name}" for name, number in sorted(errors.items()))
    return (
        f"{len(rows)} faults, {sum(row.requests for row in rows)} requests in flight or begun later: "
        f"{sum(row.completed for row in rows)} completed, {errors.total()} ended with a typed error "
        f"({named or 'none'}), "
        f"{sum(row.unended for row in rows)} never ended; longest wait {max(row.longest_s for row in rows):.1f} s; "
        f"{sum(bool(row.broken) for row in rows)} faults broke a rule."
    )


def run(
    faults: Sequence[Callable[[], Coroutine[object, object, Row]]], seed: int, tell: Callable[[list[Row]], None]
) -> list[Row]:
    """Deal each fault, in random order; return the rows in the given one.

    Args:
        faults: The faults.
        seed: Seed of the order.
        tell: Gets the rows so far.
    """
    rows: dict[int, Row] = {}
    with asyncio.Runner() as runner:
        for at in random.Random(seed).sample(range(len(faults)), len(faults)):
            rows[at] = row = runner.run(faults[at]())
            print(f"{len(rows)}/{len(faults)}", *row.cells(), *row.broken, sep=" | ", file=sys.stderr, flush=True)
            tell([rows[each] for each in sorted(rows)])
    return [rows[each] for each in sorted(rows)]


def page(backend: str, rows: Sequence[Row], planned: int, seconds: float) -> str:
    """Return the text of a run."""
    return "\n".join(
        [
            f"Faults of a fleet of {backend} engines, {datetime.date.today()}, by tests/faults/on_a_fleet.py.",
            f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.0f} at the end; {seconds:.0f} s. "
            f"{CLIENTS} clients, heartbeat {HEARTBEAT_S:.0f} s, control and weight_update {TIMEOUTS['control']:.0f} s; "
            f"torch {torch.__version__}.",
            *([f"The run ended early: {planned} faults were planned."] if len(rows) < planned else []),
            "",
            summary(rows),
            *(f"Broken: {row.struck}, {row.blow}, {row.moment}: {what}" for row in rows for what in row.broken),
            "",
            *table(rows),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", default="transformers", help="of the engines; it must be able to run in this process"
    )
    parser.add_argument("--output", type=Path, help="file for the table; it is printed, too")
    parser.add_argument("--only", action="append", default=[], help="what is struck; repeatable")
    parser.add_argument("--how", action="append", default=[], help="how it is struck; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the faults")
    parser.add_argument("--repeat", type=int, default=1, help="how often each fault is dealt")
    parser.add_argument("--hold", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.hold:
        asyncio.run(hold(*given.hold))
        return 0
    began = time.monotonic()
    with ForkServer(given.backend), ForkServer(given.backend, program="command") as forks:
        faults = plan(Lab(given.backend, tiny_model("qwen2"), forks), given.only, given.how) * given.repeat

        def write(rows: list[Row]) -> None:
            if given.output is not None:
                given.output.parent.mkdir(parents=True, exist_ok=True)
                text = page(given.backend, rows, len(faults), time.monotonic() - began)
                given.output.write_text(text, encoding="utf-8")

        rows = run(faults, given.seed, write)
    print(page(given.backend, rows, len(faults), time.monotonic() - began), end="")
    return int(any(row.broken for row in rows))


if __name__ == "__main__":
    sys.exit(main())
