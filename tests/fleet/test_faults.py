"""Engines that are killed or frozen: every request ends in a result or a typed error, and the others serve on."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from drivetrain import (
    Completion,
    DrivetrainError,
    EngineDied,
    EngineStateError,
    InferenceEngine,
    MemberLost,
    SamplingParams,
    WeightUpdateRequest,
)
from drivetrain.types.weights import DiskSource
from drivetrain_conformance.harness.time_limits import within
from drivetrain_fleet import Health
from drivetrain_weight_sync import WeightSync
from fleets import (
    BOUND,
    GREEDY,
    LONG,
    Fleet,
    Spoiled,
    kill_host,
    local,
    owned_elsewhere,
    paused_in_flight,
    spoiled,
    tensors_for,
    until,
)
from fleets import until_health as until_healthy
from warm_python import running

HEARTBEAT = {"heartbeat": 2.0}
TOKENS = 600
FLEET = """
import asyncio, base64, pickle, sys
from drivetrain import SamplingParams, WeightUpdateRequest, attach
from drivetrain.types.weights import DiskSource
from drivetrain_fleet import InferenceEngineClient

LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)

async def main():
    engines = [await attach(handle) for handle in pickle.loads(base64.b64decode(sys.argv[1]))]
    async with InferenceEngineClient(engines) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2], [3], [4]], LONG))
        while fleet.parts.in_flight.running < 4:
            await asyncio.sleep(0.001)
        if sys.argv[2] == "paused":
            await fleet.pause_generation("in_place")
        if sys.argv[2] == "updating":
            request = WeightUpdateRequest(version="never", source=DiskSource(path=sys.argv[3]))
            update = fleet.weight_update(request)
            await (await update.__aenter__()).load([0])
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
"""A fleet in a process of its own, with requests in flight, paused, updating, or neither."""
MIDDLE = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def mixed_fleet(
    model: Path, name: str = "hosted", **options: object
) -> AsyncIterator[tuple[Fleet, Callable[..., None]]]:
    """Open a fleet of two engines of this process, and one in a host process or of another owner, by ``name``.

    Yields the fleet and what sends a signal to that process.
    """
    async with AsyncExitStack() as stack:
        if name == "attached":
            other, owner = await stack.enter_async_context(owned_elsewhere(model))
        else:
            other, owner = local(model, isolation="process", timeouts=HEARTBEAT), None
        fleet = Fleet({"one": local(model), name: other, "two": local(model)}, **options)  # type: ignore[arg-type]
        await stack.enter_async_context(fleet)

        def hit(number: int = signal.SIGKILL) -> None:
            if owner is None:
                kill_host(other, number)
            else:
                os.kill(owner.pid, number)

        yield fleet, hit


async def streamed(fleet: Fleet, prompt: list[int]) -> list[Completion]:
    """Stream one completion."""
    found = []
    async for chunk in fleet.generate_stream(prompt, MIDDLE):
        if chunk.completion is not None:
            found.append(chunk.completion)
    return found


async def whole(fleet: Fleet, prompt: list[int]) -> list[Completion]:
    """Generate one completion."""
    return (await fleet.generate(prompt, MIDDLE)).completions


async def ended(tasks: list[asyncio.Task[list[Completion]]]) -> tuple[list[Completion], list[DrivetrainError]]:
    """Wait for all; every one must end in completions or a typed error, in bounded time."""
    async with within(seconds=BOUND):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    for error in errors:
        assert isinstance(error, DrivetrainError), repr(error)
        assert not isinstance(error, EngineDied)
    completions = [c for one in results if not isinstance(one, BaseException) for c in one]
    return completions, [error for error in errors if isinstance(error, DrivetrainError)]


def whole_requests(fleet: Fleet) -> list[asyncio.Task[list[Completion]]]:
    """Start two requests for each of three engines."""
    return [asyncio.create_task(whole(fleet, [i + 1, 2])) for i in range(6)]


def versions(completions: list[Completion]) -> set[str]:
    return {span.version for completion in completions for span in completion.weight_versions}


@pytest.mark.parametrize("name", ["hosted", "attached"])
async def test_an_engine_that_is_killed_while_it_generates(model: Path, name: str) -> None:
    async with mixed_fleet(model, name, max_samples_per_engine=4) as (fleet, hit):
        tasks = [asyncio.create_task((streamed if i % 2 else whole)(fleet, [i + 1, i + 2])) for i in range(24)]
        await until(lambda: fleet.begun(name) >= 2)
        hit()
        completions, errors = await ended(tasks)
        assert all(isinstance(error, MemberLost) and error.member == name for error in errors)
        assert 1 <= len(errors) <= 4
        assert len(completions) == 24 - len(errors)
        assert all(len(completion.token_ids) == TOKENS for completion in completions)
        await until_healthy(fleet, name, Health.FAILED)
        assert fleet.state.value == "ready"
        others = [one.health.value for one in fleet.members if one.name != name]
        assert others == ["ready", "ready"]
        assert [(one.samples, one.tokens) for one in fleet.members] == [(0, 0)] * 3
        assert len((await fleet.generate([[1], [2], [3]], GREEDY)).completions) == 3
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="after")
        output = await fleet.generate([[1], [2], [3]], GREEDY)
        assert versions(output.completions) == {"after"}
        await fleet.remove(name)
        await fleet.add(local(model), "new")
        assert fleet.report("new").health is Health.STALE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hosted", "attached"])
@pytest.mark.parametrize("call", ["prepare_weight_update", "pause_generation", "apply_update"])
async def test_an_engine_that_is_killed_while_weights_are_pushed(model: Path, name: str, call: str) -> None:
    async with mixed_fleet(model, name) as (fleet, hit):

        def start() -> list[asyncio.Task[list[Completion]]]:
            return [asyncio.create_task((streamed if i % 2 else whole)(fleet, [i + 1, 2])) for i in range(9)]

        tasks = await paused_in_flight(fleet, start, 3, name)
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            with hitting(fleet, name, call, hit):
                await sync.push(version="one")
            assert fleet.get_weight_version() == "one"
            await until_healthy(fleet, name, Health.FAILED)
            completions, errors = await ended(tasks)
            assert all(isinstance(error, MemberLost) and error.member == name for error in errors)
            assert len(errors) == 3
            assert versions(completions) <= {"initial", "one"}
            assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"one"}
            await sync.push(version="two")
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"two"}


@pytest.mark.slow
@pytest.mark.parametrize("call", ["begin_update", "load_buckets", "commit_update"])
async def test_an_engine_that_is_killed_bucket_by_bucket(model: Path, call: str) -> None:
    async with mixed_fleet(model) as (fleet, hit):
        tasks = await paused_in_flight(fleet, partial(whole_requests, fleet), 2, "hosted")
        request = WeightUpdateRequest(version="hand", source=DiskSource(path=str(model)))
        with hitting(fleet, "hosted", call, hit):
            async with fleet.weight_update(request) as update:
                for index in range(update.buckets):
                    await update.load([index])
        completions, errors = await ended(tasks)
        assert len(errors) == 2
        assert versions(completions) <= {"initial", "hand"}
        assert fleet.state.value == "ready"
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"hand"}


async def test_too_few_engines_after_a_kill_fail_the_push_and_nothing_is_served(model: Path) -> None:
    async with mixed_fleet(model, min_engines=3) as (fleet, hit):
        tasks = await paused_in_flight(fleet, partial(whole_requests, fleet), 2, "hosted")
        tensors = await tensors_for(fleet)
        async with WeightSync.connect(tensors, fleet) as sync:
            with hitting(fleet, "hosted", "apply_update", hit), pytest.raises(DrivetrainError, match="min_engines=3"):
                await sync.push(version="never")
            assert fleet.state.value == "dirty"
            with pytest.raises(EngineStateError, match="dirty"):
                await fleet.generate([1], GREEDY)
            with pytest.raises(DrivetrainError, match="min_engines=3"):
                await sync.push(version="again")
            await fleet.remove("hosted")
            await fleet.add(local(model), "new")
            await sync.push(version="two")
        completions, errors = await ended(tasks)
        assert versions(completions) <= {"initial", "two"}
        assert len(errors) == 2
        assert versions((await fleet.generate([[1], [2], [3]], GREEDY)).completions) == {"two"}


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pause_generation", "continue_generation", "sleep", "wake_up"])
async def test_an_engine_that_is_killed_while_all_are_controlled(model: Path, call: str) -> None:
    async with mixed_fleet(model) as (fleet, hit):
        tasks = await paused_in_flight(fleet, partial(whole_requests, fleet), 2, "hosted")
        with hitting(fleet, "hosted", call, hit):
            await fleet.pause_generation("retract")
            await fleet.sleep(["kv_cache"])
            await fleet.wake_up()
            await fleet.continue_generation()
        completions, errors = await ended(tasks)
        assert (len(completions), len(errors)) == (4, 2)
        assert [one.health.value for one in fleet.members] == ["ready", "failed", "ready"]
        assert (await fleet.generate([[1], [2]], GREEDY)).completions


@pytest.mark.slow
async def test_an_engine_that_freezes_is_lost_in_bounded_time(model: Path) -> None:
    async with mixed_fleet(model) as (fleet, hit):
        tasks = await paused_in_flight(fleet, partial(whole_requests, fleet), 2, "hosted")
        hit(signal.SIGSTOP)
        completions, errors = await ended(tasks)
        assert (len(completions), len(errors)) == (4, 2)
        assert fleet.report("hosted").health is Health.FAILED
        assert fleet.state.value == "ready"


async def test_a_fleet_whose_engines_are_all_dead_has_failed(model: Path) -> None:
    engines: list[InferenceEngine] = [local(model, isolation="process", timeouts=HEARTBEAT) for _ in range(2)]
    async with Fleet(engines) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2], [3], [4]], LONG))
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 2)
        for engine in engines:
            kill_host(engine)
        async with within(seconds=BOUND):
            with pytest.raises((MemberLost, EngineDied)):
                await task
        await until(lambda: fleet.state.value == "failed")
        with pytest.raises(EngineDied, match="every engine of the fleet has failed"):
            await fleet.generate([1], GREEDY)


class hitting:
    """Hit a member's process just before it is asked for something."""

    def __init__(self, fleet: Fleet, name: str, call: str, hit: Callable[..., None]) -> None:
        member = fleet.member(name)
        made: Callable[..., Awaitable[object]] = getattr(member.calls, call)
        self._spoiled = spoiled(member)

        async def killed(*arguments: object) -> object:
            hit()
            return await made(*arguments)

        self._call, self._killed = call, killed

    def __enter__(self) -> Spoiled:
        calls = self._spoiled.__enter__()
        calls.instead[self._call] = self._killed
        return calls

    def __exit__(self, *error: object) -> None:
        self._spoiled.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("doing", "number"),
    [("generates", signal.SIGKILL), ("paused", signal.SIGKILL), ("paused", signal.SIGSTOP)],
    ids=["killed while it generates", "killed while paused", "frozen while paused"],
)
async def test_engines_serve_on_when_the_process_of_their_fleet_is_gone(
    model: Path, doing: str, number: signal.Signals
) -> None:
    async with local(model, timeouts=HEARTBEAT) as one, local(model, timeouts=HEARTBEAT) as two:
        handles = [await one.handle(), await two.handle()]
        given = base64.b64encode(pickle.dumps(handles)).decode()
        async with running("-c", FLEET, given, doing) as process:
            assert (await process.stdout.readline()).strip() == b"ready"
            os.kill(process.pid, number)
            await until(lambda: not any(engine.is_paused or engine.parts.in_flight.running for engine in (one, two)))
            for engine in (one, two):
                output = await engine.generate([[5]], GREEDY)
                assert len(output.completions[0].token_ids) == 6


async def test_engines_serve_again_when_their_fleet_was_killed_within_an_update(model: Path) -> None:
    """The fleet had paused its engines. They are dirty, and the pause goes with the fleet, not with the push."""
    async with local(model, timeouts=HEARTBEAT) as one, local(model, timeouts=HEARTBEAT) as two:
        given = base64.b64encode(pickle.dumps([await one.handle(), await two.handle()])).decode()
        async with running("-c", FLEET, given, "updating", str(model)) as process:
            assert (await process.stdout.readline()).strip() == b"ready"
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: all(engine.state.value == "dirty" for engine in (one, two)))
            for engine in (one, two):
                async with WeightSync.connect(await tensors_for(engine), engine) as sync:
                    await sync.push(version="after")
                async with within(seconds=BOUND):
                    output = await engine.generate([[5]], GREEDY)
                assert versions(output.completions) == {"after"}
