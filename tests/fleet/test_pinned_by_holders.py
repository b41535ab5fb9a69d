"""Requests pinned to a weight version, through handles: to a fleet, to its engines, and with a version that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from drivetrain import DeadlineExceeded, InferenceEngine, WeightVersionGone, attach
from drivetrain.backend.base import GenerateRequest, TokenDelta
from drivetrain.process.shared_engine import SharedEngine
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync
from fleets import BOUND, GREEDY, Fleet, Spoiled, fleet_of, local, owned_elsewhere, spoiled, tensors_for, until

BROKEN = DeadlineExceeded("waited for the disk")
PROMPTS = [[i] for i in range(8)]


async def pushed(engine: InferenceEngine, version: str) -> None:
    """Push random weights."""
    async with WeightSync.connect(await tensors_for(engine), engine) as sync:
        await sync.push(version=version)


async def served(engine: InferenceEngine, version: str) -> None:
    """Ask for a version in whole and in chunks; all tokens must be of it."""
    output = await engine.generate(PROMPTS, GREEDY, weight_version=version)
    assert {one.weight_version for one in output.completions} == {version}
    async for chunk in engine.generate_stream(PROMPTS, GREEDY, weight_version=version):
        assert chunk.completion is None or chunk.completion.weight_version == version


@asynccontextmanager
async def held(engine: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    """Attach to an engine of this process."""
    holder = await attach(await engine.handle())
    yield holder
    await holder.teardown()


@asynccontextmanager
async def mirrors_late(holder: InferenceEngine) -> AsyncIterator[None]:
    """Let a holder learn nothing of its owner's state."""
    backend = holder.parts.backend
    adopt = vars(backend)["on_state"]
    vars(backend)["on_state"] = None
    yield
    vars(backend)["on_state"] = adopt


async def test_the_holder_of_a_fleet_asks_for_the_version_of_a_lagging_engine(model: Path) -> None:
    async with fleet_of(2, model, max_staleness=1) as fleet, held(fleet) as holder:
        with spoiled(fleet.member("engine-1"), prepare_weight_update=BROKEN):
            await pushed(holder, "one")
        assert fleet.health() == ["ready", "lagging"]
        await served(holder, "one")
        await served(holder, "initial")
        with pytest.raises(WeightVersionGone, match=r"'never' is not served.*engine-0 serves 'one', engine-1 serves"):
            await holder.generate(PROMPTS, GREEDY, weight_version="never")
        await pushed(holder, "two")
        with pytest.raises(WeightVersionGone, match="'initial' is not served"):
            await holder.generate(PROMPTS, GREEDY, weight_version="initial")
        await served(holder, "two")


async def test_engines_attached_by_handle_lag_and_serve_pinned_requests(model: Path) -> None:
    async with owned_elsewhere(model) as (remote, _), local(model) as own, held(own) as mine:
        async with fleet_of([mine, remote], model, max_staleness=1) as fleet, held(fleet) as holder:
            with spoiled(fleet.member("engine-1"), prepare_weight_update=BROKEN):
                await pushed(fleet, "one")
            assert fleet.health() == ["ready", "lagging"]
            for page in (fleet, holder):
                await served(page, "one")
                await served(page, "initial")
            await pushed(holder, "two")
            assert fleet.health() == ["ready", "ready"]
            assert own.get_weight_version() == "two"
            with pytest.raises(WeightVersionGone, match="'initial' is not served"):
                await holder.generate(PROMPTS, GREEDY, weight_version="initial")


async def test_the_owner_decides_while_the_holder_does_not_know_its_version_yet(model: Path) -> None:
    async with local(model) as engine, held(engine) as holder, mirrors_late(holder):
        await engine.update_weight_version("one")
        assert holder.get_weight_version() == "initial"
        await served(holder, "one")
        with pytest.raises(WeightVersionGone, match="'initial' is not served; the engine serves 'one'"):
            await holder.generate(PROMPTS, GREEDY, weight_version="initial")


async def test_a_request_that_an_engine_of_another_version_refuses_goes_to_the_next(model: Path) -> None:
    """Another holder has changed one engine, and the fleet has not learnt of it yet."""
    async with local(model) as first, local(model) as second, held(first) as one, held(second) as other:
        async with fleet_of([one, other], model) as fleet:
            async with mirrors_late(one):
                await first.update_weight_version("by another")
                await served(fleet, "initial")
                assert fleet.member("engine-0").load.taken
                assert fleet.health() == ["ready", "ready"]


async def test_a_request_without_a_token_goes_to_the_engine_that_lags(model: Path) -> None:
    async with fleet_of(2, model, max_staleness=1) as fleet:
        member, go = fleet.member("engine-0"), asyncio.Event()
        calls = member.calls

        async def late(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            await go.wait()
            async for delta in calls.stream(request):
                yield delta

        member.calls = cast(SharedEngine, Spoiled(calls, stream=late))  # type: ignore[arg-type]
        task = asyncio.create_task(served_once(fleet, "initial"))
        await until(lambda: member.load.samples > 0)
        with spoiled(fleet.member("engine-1"), prepare_weight_update=BROKEN):
            await pushed(fleet, "one")
        go.set()
        async with within(seconds=BOUND):
            await task
        assert [one.samples for one in fleet.members] == [0, 0]


async def served_once(fleet: Fleet, version: str) -> None:
    """Ask for one completion of a version."""
    (completion,) = (await fleet.generate([[1, 2]], GREEDY, weight_version=version)).completions
    assert completion.weight_version == version
