"""A fleet from which one engine's network is cut, without a word to either side.

A killed process closes its sockets, and a cut network does not: nothing arrives any more, and nothing is refused. The
engine is that of ``drivetrain host``, behind a relay that stops relaying, and in a network namespace where this machine
allows one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from drivetrain import Completion, DrivetrainError, InferenceEngine, MemberLost, SamplingParams, create_engine
from drivetrain_conformance.harness.time_limits import within
from drivetrain_fleet import Health
from drivetrain_weight_sync import WeightSync
from fleets import BOUND, GREEDY, Fleet, local, paused_in_flight, tensors_for, until, until_health
from links import KINDS, Link, laid

pytestmark = pytest.mark.slow

KEY = "a key of enough characters"
HEARTBEAT_S = 3
TOKENS = 600
MIDDLE = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def far_engine(link: Link, model: Path) -> AsyncIterator[str]:
    """Start ``drivetrain host`` at the far end; yield its endpoint at this end."""
    process = await asyncio.create_subprocess_exec(
        *(*link.command(), sys.executable, "-m", "drivetrain", "host", "--model", str(model)),
        *("--isolation", "inline", "--listen", f"{link.far}:0", "--set", f"timeouts={{heartbeat: {HEARTBEAT_S}}}"),
        stdout=subprocess.PIPE,
        env={**os.environ, "DRIVETRAIN_KEY": KEY},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("endpoint: "), line
        yield await link.near(line.removeprefix("endpoint: ").strip())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def remote(endpoint: str) -> InferenceEngine:
    """Make the page of the engine at an endpoint, not started."""
    return await asyncio.to_thread(create_engine, "remote", endpoint=endpoint, key=KEY)


@asynccontextmanager
async def fleet_with_a_far_engine(kind: str, model: Path) -> AsyncIterator[tuple[Fleet, Link, str]]:
    """Open a fleet of one engine of this process and one across a link; yield it, the link and the endpoint."""
    async with AsyncExitStack() as stack:
        link = stack.enter_context(laid(kind))
        endpoint = await stack.enter_async_context(far_engine(link, model))
        fleet = Fleet({"near": local(model), "far": await remote(endpoint)})
        yield await stack.enter_async_context(fleet), link, endpoint


async def streamed(fleet: Fleet, prompt: list[int]) -> list[Completion]:
    """Stream one completion."""
    return [chunk.completion async for chunk in fleet.generate_stream(prompt, MIDDLE) if chunk.completion is not None]


async def whole(fleet: Fleet, prompt: list[int]) -> list[Completion]:
    """Generate one completion."""
    return (await fleet.generate(prompt, MIDDLE)).completions


def versions(completions: list[Completion]) -> set[str]:
    return {span.version for completion in completions for span in completion.weight_versions}


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_end_and_the_engine_can_come_back(model: Path, kind: str) -> None:
    async with fleet_with_a_far_engine(kind, model) as (fleet, link, endpoint):

        def start() -> list[asyncio.Task[list[Completion]]]:
            return [asyncio.create_task((streamed if i % 2 else whole)(fleet, [i + 1, i + 2])) for i in range(12)]

        tasks = await paused_in_flight(fleet, start, 6, "far")
        link.cut()
        async with within(seconds=BOUND):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [one for one in results if isinstance(one, BaseException)]
        assert len(lost) == 6
        assert all(isinstance(one, MemberLost) and one.member == "far" for one in lost), lost
        assert all(len(c.token_ids) == TOKENS for one in results if isinstance(one, list) for c in one)
        await until_health(fleet, "far", Health.FAILED)
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
            assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"one"}
            link.mend()
            gone = await fleet.remove("far")
            await gone.teardown()
            again = await remote(endpoint)
            await fleet.add(again, "again")
            assert fleet.report("again").health is Health.STALE
            assert (await again.stats()).running == 0, "its owner has given up what the lost holder asked for"
            await sync.push(version="two")
        output = await fleet.generate([[1], [2], [3], [4]], GREEDY)
        assert versions(output.completions) == {"two"}
        assert fleet.health() == ["ready", "ready"]


@pytest.mark.parametrize("kind", KINDS[-1:])
@pytest.mark.parametrize("call", ["prepare_weight_update", "pause_generation", "apply_update"])
async def test_a_push_commits_without_it_and_it_serves_nothing_between(model: Path, kind: str, call: str) -> None:
    async with fleet_with_a_far_engine(kind, model) as (fleet, link, endpoint):
        tasks = [asyncio.create_task(whole(fleet, [i + 1, 2])) for i in range(4)]
        await until(lambda: fleet.begun("far") == fleet.begun("near") == 2)
        member = fleet.member("far")
        ask = getattr(member.calls, call)

        async def cut_first(*arguments: object) -> object:
            link.cut()
            return await ask(*arguments)

        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            setattr(member.calls, call, cut_first)
            async with within(seconds=BOUND):
                await sync.push(version="one")
            delattr(member.calls, call)
        async with within(seconds=BOUND):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, DrivetrainError) for one in results if isinstance(one, BaseException)), results
        assert versions([c for one in results if isinstance(one, list) for c in one]) <= {"initial", "one"}
        await until_health(fleet, "far", Health.FAILED)
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"one"}
        link.mend()
        async with within(seconds=BOUND):
            again = await remote(endpoint)
            async with again:
                await until(lambda: again.state.value in ("ready", "dirty"))
                if again.state.value == "ready":
                    found = await again.generate([1], GREEDY)
                    assert versions(found.completions) == {"initial"}, "nothing of an update that it never heard of"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_shorter_than_the_heartbeat_loses_nothing(model: Path, kind: str) -> None:
    async with fleet_with_a_far_engine(kind, model) as (fleet, link, _):
        tasks = [asyncio.create_task((streamed if i % 2 else whole)(fleet, [i + 1, 2])) for i in range(4)]
        await until(lambda: fleet.begun("far") == 2)
        link.cut()
        await asyncio.sleep(0.3)
        link.mend()
        async with within(seconds=BOUND):
            results = await asyncio.gather(*tasks)
        assert all(len(completion.token_ids) == TOKENS for one in results for completion in one)
        assert fleet.health() == ["ready", "ready"]
