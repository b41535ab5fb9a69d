"""Fleets over engines that live on: which of them are known to have the weights that the fleet serves."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
from pathlib import Path

import pytest

from drivetrain import EngineBusy, InferenceEngine, InvalidRequest, MemoryTag, WeightUpdateRequest, attach
from drivetrain.types.weights import DiskSource
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_fleet import Health
from drivetrain_weight_sync import WeightSync
from fleets import GREEDY, LONG, OWNER, Fleet, fleet_of, local, tensors_for, until
from warm_python import running

FLEET = """
import asyncio, base64, pickle, sys, torch
from drivetrain import attach
from drivetrain_fleet import InferenceEngineClient
from drivetrain_weight_sync import WeightSync

async def main():
    engines = [await attach(handle) for handle in pickle.loads(base64.b64decode(sys.argv[1]))]
    async with InferenceEngineClient(engines) as fleet:
        manifest = await fleet.weight_manifest()
        tensors = {one.name: torch.randn(one.shape, dtype=getattr(torch, one.dtype)) * 0.05 for one in manifest.tensors}
        async with WeightSync.connect(tensors, fleet) as sync:
            await sync.push(version="step-5")
            print("pushed", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""
"""A fleet in a process of its own, which pushes to engines that others own."""


async def attached_to(*engines: InferenceEngine) -> list[InferenceEngine]:
    """Attach to engines by handle, so that a fleet's teardown leaves them open."""
    return [await attach(await engine.handle()) for engine in engines]


async def pushed(engine: InferenceEngine, version: str, strategy: str = "auto") -> None:
    """Push random weights."""
    async with WeightSync.connect(await tensors_for(engine), engine, strategy) as sync:
        await sync.push(version=version)


async def served_by_all(fleet: Fleet, version: str) -> None:
    """Assert that each engine of a fleet serves one version, and that all answer alike."""
    assert fleet.health() == ["ready"] * len(fleet.members)
    output = await fleet.generate([[i] for i in range(8)], GREEDY, weight_version=version)
    assert {one.weight_version for one in output.completions} == {version}
    assert all(member.load.taken for member in fleet.backend.members)
    answers = [(await engine.generate([[5]], GREEDY)).completions[0].token_ids for engine in fleet.engines.values()]
    assert all(answer == answers[0] for answer in answers)


# A fleet made anew ------------------------------------------------------------------------------------------------


async def test_a_fleet_made_anew_after_a_kill_serves_what_all_engines_committed(model: Path) -> None:
    async with running("-c", OWNER, str(model)) as one, running("-c", OWNER, str(model)) as two:
        handles = [pickle.loads(base64.b64decode(await owner.stdout.readline())) for owner in (one, two)]
        given = base64.b64encode(pickle.dumps(handles)).decode()
        async with running("-c", FLEET, given) as process:
            assert (await process.stdout.readline()).strip() == b"pushed"
            os.kill(process.pid, signal.SIGKILL)
        async with fleet_of([await attach(handle) for handle in handles], model) as fleet:
            assert fleet.get_weight_version() == "step-5"
            await served_by_all(fleet, "step-5")


@pytest.mark.parametrize("strategy", ["shared_memory", "disk", "delta", "broadcast"])
async def test_a_push_by_any_strategy_makes_engines_known_to_the_next_fleet(model: Path, strategy: str) -> None:
    async with local(model) as one, local(model) as two:
        async with fleet_of(await attached_to(one, two), model) as fleet:
            async with WeightSync.connect(await tensors_for(fleet), fleet, strategy) as sync:
                await sync.push(version="step-4")
                await sync.push(version="step-5")
        async with fleet_of(await attached_to(one, two), model) as fleet:
            await served_by_all(fleet, "step-5")


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "bucket by bucket"])
async def test_a_checkpoint_that_all_engines_loaded_makes_them_known(model: Path, at_once: bool) -> None:
    async with local(model) as one, local(model) as two:
        async with fleet_of(await attached_to(one, two), model) as fleet:
            request = WeightUpdateRequest(version="step-5", source=DiskSource(path=str(model)))
            async with fleet.weight_update(request, at_once=at_once) as update:
                for index in range(0 if at_once else update.buckets):
                    await update.load([index])
        async with fleet_of(await attached_to(one, two), model) as fleet:
            await served_by_all(fleet, "step-5")


async def test_two_pushes_of_one_label_are_two_weights(model: Path) -> None:
    async with local(model) as one, local(model) as two:
        for engine in (one, two):
            await pushed(engine, "step-5")
        async with fleet_of(await attached_to(one, two), model) as fleet:
            assert fleet.health() == ["ready", "stale"]
            assert "'step-5' of the update " in fleet.members[1].why
            output = await fleet.generate([[i] for i in range(4)], GREEDY)
            expected = await one.generate([[i] for i in range(4)], GREEDY)
            assert [c.token_ids for c in output.completions] == [c.token_ids for c in expected.completions]
            await pushed(fleet, "step-6")
            await served_by_all(fleet, "step-6")


async def test_a_fleet_takes_the_weights_that_most_engines_have(model: Path) -> None:
    """The first engine missed the last push of the fleet before."""
    async with local(model) as one, local(model) as two, local(model) as three:
        async with fleet_of(await attached_to(one, two, three), model) as fleet:
            await pushed(fleet, "step-4")
        async with fleet_of(await attached_to(two, three), model) as fleet:
            await pushed(fleet, "step-5")
        async with fleet_of(await attached_to(one, two, three), model) as fleet:
            assert fleet.get_weight_version() == "step-5"
            assert fleet.health() == ["stale", "ready", "ready"]


async def test_another_version_of_the_same_weights_stays_known(model: Path) -> None:
    async with local(model) as one, local(model) as two:
        for before in ("initial", "pushed"):
            async with fleet_of(await attached_to(one, two), model) as fleet:
                if before == "pushed":
                    await pushed(fleet, "step-5")
                await fleet.update_weight_version(f"{before}, named anew")
            async with fleet_of(await attached_to(one, two), model) as fleet:
                await served_by_all(fleet, f"{before}, named anew")
        await two.update_weight_version("another name")
        async with fleet_of(await attached_to(one, two), model) as fleet:
            assert fleet.health() == ["ready", "stale"]


async def test_weights_that_slept_and_were_not_kept_are_unknown(model: Path) -> None:
    async with local(model) as one, local(model, sleep_keeps_weights=False) as two:
        async with fleet_of(await attached_to(one, two), model) as fleet:
            await pushed(fleet, "step-5")
        await two.sleep([MemoryTag.WEIGHTS])
        await two.wake_up([MemoryTag.WEIGHTS])
        async with fleet_of(await attached_to(one, two), model) as fleet:
            assert fleet.health() == ["ready", "stale"]
            assert "its weights are dirty" in fleet.members[1].why


async def test_a_fleet_waits_for_the_end_of_an_update_that_is_under_way(model: Path) -> None:
    async with local(model) as one, local(model) as two:
        pages = await attached_to(one, two)
        request = WeightUpdateRequest(version="step-5", source=DiskSource(path=str(model)))
        await one.update_named_weights(request)
        async with two.weight_update(request) as update:
            await until(lambda: pages[1].state.value == "updating")
            fleet = Fleet(pages)
            starting = asyncio.create_task(fleet.start())
            for index in range(update.buckets):
                await update.load([index])
            assert not starting.done()
        await starting
        try:
            await served_by_all(fleet, "step-5")
        finally:
            await fleet.teardown()


@pytest.mark.parametrize("timeouts", [{"weight_update": 0.2}, {"start": 12.0, "close": 1.0}], ids=["update", "start"])
async def test_a_fleet_does_not_wait_for_ever_for_an_update_of_another(model: Path, timeouts: dict[str, float]) -> None:
    async with local(model) as one, local(model) as two:
        pages = await attached_to(one, two)
        for page in pages:
            shorter = page.config.timeouts.model_copy(update=timeouts)
            page.config = page.config.model_copy(update={"timeouts": shorter})
        request = WeightUpdateRequest(version="step-5", source=DiskSource(path=str(model)))
        async with one.weight_update(request) as update:
            await until(lambda: pages[0].state.value == "updating")
            async with fleet_of(pages, model) as fleet:
                assert fleet.health() == ["stale", "ready"]
            for index in range(update.buckets):
                await update.load([index])


async def test_a_handle_to_a_fleet_made_anew_tells_the_update(model: Path) -> None:
    async with local(model) as one, local(model) as two, local(model) as three:
        async with fleet_of(await attached_to(one, two, three), model) as fleet:
            await pushed(fleet, "step-5")
        async with fleet_of(await attached_to(one, two), model) as inner:
            async with fleet_of([await attach(await inner.handle()), *await attached_to(three)], model) as outer:
                await served_by_all(outer, "step-5")


# Adapters ---------------------------------------------------------------------------------------------------------


async def test_adapters_of_an_earlier_fleet_do_not_stay_on_its_engines(model: Path, tmp_path: Path) -> None:
    make_adapter(model, tmp_path, seed=1)
    async with local(model, enable_lora=True) as one, local(model, enable_lora=True) as two:
        async with fleet_of(await attached_to(one, two), model) as fleet:
            await fleet.load_lora_adapter("a", str(tmp_path))
        async with fleet_of(await attached_to(one, two), model) as fleet:
            assert [engine.parts.loaded_adapters.names for engine in (one, two)] == [(), ()]
            await fleet.load_lora_adapter("a", str(tmp_path))
            output = await fleet.generate([[i] for i in range(4)], GREEDY, lora="a")
            assert len(output.completions) == 4


async def test_an_adapter_in_use_stays_and_its_engine_serves(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_adapter(model, tmp_path, seed=1)
    async with local(model, enable_lora=True) as one, local(model, enable_lora=True) as two:
        holder = await attach(await one.handle())
        await holder.load_lora_adapter("a", str(tmp_path))
        await holder.load_lora_adapter("idle", str(tmp_path))
        using = asyncio.create_task(holder.generate([[1]], LONG, lora="a"))
        await until(lambda: one.parts.in_flight.using_lora("a") > 0)
        async with fleet_of(await attached_to(one), model) as fleet:
            assert fleet.health() == ["ready"]
            (other,) = await attached_to(two)
            await fleet.add(other)
            assert fleet.health() == ["ready", "ready"]
            assert one.parts.loaded_adapters.names == ("a",)
            assert "engine-0 keeps the adapter 'a' of another holder" in caplog.text
            output = await fleet.generate([[i] for i in range(4)], GREEDY)
            assert len(output.completions) == 4
            with pytest.raises(InvalidRequest, match="'a' is not loaded"):
                await fleet.generate([[1]], GREEDY, lora="a")
            with pytest.raises(EngineBusy, match="used by 1 requests"):
                await fleet.load_lora_adapter("a", str(tmp_path))
            assert fleet.health() == ["ready", "ready"]
            assert [engine.parts.loaded_adapters.names for engine in (one, two)] == [("a",), ()]
            using.cancel()
            await asyncio.wait([using])
            await fleet.load_lora_adapter("a", str(tmp_path))
            output = await fleet.generate([[i] for i in range(4)], GREEDY, lora="a")
            assert len(output.completions) == 4
            await fleet.unload_lora_adapter("a")
            assert [engine.parts.loaded_adapters.names for engine in (one, two)] == [(), ()]
        await holder.teardown()


async def test_an_engine_joins_although_another_holder_uses_its_adapter(model: Path, tmp_path: Path) -> None:
    make_adapter(model, tmp_path, seed=1)
    async with local(model, enable_lora=True) as one, local(model, enable_lora=True) as two:
        await one.load_lora_adapter("a", str(tmp_path))
        using = asyncio.create_task(one.generate([[1]], LONG, lora="a"))
        await until(lambda: one.parts.in_flight.using_lora("a") > 0)
        async with fleet_of(await attached_to(two), model) as fleet:
            (other,) = await attached_to(one)
            await fleet.add(other)
            assert fleet.health() == ["ready", "ready"]
            using.cancel()


# Engines that join ------------------------------------------------------------------------------------------------


async def test_an_engine_that_comes_back_with_the_fleets_update_is_ready(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        await pushed(fleet, "step-5")
        engine = await fleet.remove("engine-1")
        await fleet.add(engine, "back")
        await served_by_all(fleet, "step-5")
        engine = await fleet.remove("back")
        await pushed(fleet, "step-6")
        await fleet.add(engine, "late")
        assert fleet.report("late").health is Health.STALE


async def test_a_push_of_the_fleets_label_that_was_not_seen_makes_an_engine_stale(model: Path) -> None:
    """While its connection is broken, an attached engine reports no change; then it reports the newest state."""
    async with fleet_of(2, model) as fleet:
        await pushed(fleet, "step-5")
        fleet.member("engine-1").engine.parts.weights.publish("step-5", "another")
        assert fleet.health() == ["ready", "stale"]
        assert "has pushed other weights as 'step-5'" in fleet.report("engine-1").why
