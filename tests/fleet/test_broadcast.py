"""One broadcast to the ranks of all engines of a fleet."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from drivetrain import (
    CommunicatorSpec,
    DrivetrainError,
    EngineInternalError,
    EngineStateError,
    InferenceEngine,
    InvalidRequest,
    MemberLost,
    UnsupportedCapability,
    attach,
)
from drivetrain_conformance.harness.time_limits import within
from drivetrain_fleet import Health
from drivetrain_weight_sync import WeightSync
from drivetrain_weight_sync.transports import process_groups
from fleets import BOUND, GREEDY, Fleet, kill_host, local, spoiled, tensors_for, until_health

TIMEOUTS = {"heartbeat": 2.0, "weight_update": 20.0}
SMALL_BUCKETS = 1 << 14


def hosted(model: Path) -> InferenceEngine:
    return local(model, isolation="process", timeouts=TIMEOUTS)


@asynccontextmanager
async def hosted_fleet(model: Path, **options: object) -> AsyncIterator[tuple[Fleet, list[InferenceEngine]]]:
    """Open a fleet of two engines in host processes."""
    engines = [hosted(model), hosted(model)]
    async with Fleet(engines, **options) as fleet:  # type: ignore[arg-type]
        yield fleet, engines


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int], None]]:
    """Functions that are called before each broadcast of this process, with the number of earlier ones."""
    hooks: list[Callable[[int], None]] = []
    start, number = process_groups.Group.start, iter(range(1 << 20))

    def started(group: process_groups.Group, buffer: torch.Tensor) -> process_groups.Broadcast:
        before = next(number)
        for hook in hooks:
            hook(before)
        return start(group, buffer)

    monkeypatch.setattr(process_groups.Group, "start", started)
    return hooks


async def require_weights(engine: InferenceEngine, tensors: dict[str, torch.Tensor]) -> None:
    for name in (next(iter(tensors)), next(reversed(tensors))):
        assert (await engine.get_weights_by_name(name)).data == tensors[name].numpy().tobytes()


async def require_serves(fleet: Fleet, version: str) -> None:
    output = await fleet.generate([[1, 2], [3, 4], [5]], GREEDY)
    assert {span.version for one in output.completions for span in one.weight_versions} == {version}


async def test_a_bucket_is_one_collective_for_all_engines(
    model: Path, collectives: list[Callable[[int], None]]
) -> None:
    count: list[int] = []
    collectives.append(count.append)
    async with hosted_fleet(model, min_engines=2) as (fleet, engines):
        tensors = await tensors_for(fleet)
        async with WeightSync.connect(tensors, fleet, "broadcast", bucket_bytes=SMALL_BUCKETS) as sync:
            result = await sync.push(version="one")
            assert result.buckets > 3
            assert len(count) == 1 + result.buckets  # the first one forms the group
            await sync.push(version="two")
            assert len(count) == 1 + 2 * result.buckets
        for engine in engines:
            await require_weights(engine, tensors)
        await require_serves(fleet, "two")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_an_engine_lost_in_a_broadcast_is_named_and_nothing_is_served_until_the_next_push(
    model: Path, collectives: list[Callable[[int], None]], number: signal.Signals
) -> None:
    async with hosted_fleet(model, min_engines=2) as (fleet, engines):
        tensors = await tensors_for(fleet)

        def hit(before: int) -> None:
            if before == 2:
                kill_host(engines[1], number)
                time.sleep(0.2)

        collectives.append(hit)
        async with WeightSync.connect(tensors, fleet, "broadcast", bucket_bytes=SMALL_BUCKETS) as sync:
            async with within(seconds=BOUND):
                with pytest.raises(DrivetrainError, match="engine-1"):
                    await sync.push(version="never")
            assert fleet.state.value == "dirty"
            with pytest.raises(EngineStateError, match="dirty"):
                await fleet.generate([1], GREEDY)
            await until_health(fleet, "engine-1", Health.FAILED)
            assert fleet.report("engine-0").health is Health.STALE
            await fleet.remove("engine-1")
            await fleet.add(hosted(model), "new")
            await sync.push(version="next")
        await require_weights(engines[0], tensors)
        await require_serves(fleet, "next")
        assert fleet.health() == ["ready", "ready"]


async def test_the_engines_that_are_left_take_the_next_broadcast(
    model: Path, collectives: list[Callable[[int], None]]
) -> None:
    async with hosted_fleet(model) as (fleet, engines):
        tensors = await tensors_for(fleet)
        async with WeightSync.connect(tensors, fleet, "broadcast") as sync:
            await sync.push(version="one")
            kill_host(engines[1])
            await until_health(fleet, "engine-1", Health.FAILED)
            await sync.push(version="two")
            assert fleet.health() == ["ready", "failed"]
            await require_serves(fleet, "two")


async def test_an_engine_that_joins_later_is_synced_before_it_serves(model: Path) -> None:
    async with hosted_fleet(model) as (fleet, _):
        tensors = await tensors_for(fleet)
        async with WeightSync.connect(tensors, fleet, "broadcast") as sync:
            await sync.push(version="one")
            late = hosted(model)
            name = await fleet.add(late)
            assert fleet.report(name).health is Health.STALE
            await require_serves(fleet, "one")
            await sync.push(version="two")
        assert fleet.health() == ["ready"] * 3
        await require_weights(late, tensors)
        await require_serves(fleet, "two")


async def test_an_engine_that_cannot_prepare_keeps_all_others_out_of_the_collective(model: Path) -> None:
    async with hosted_fleet(model) as (fleet, _):
        tensors = await tensors_for(fleet)
        async with WeightSync.connect(tensors, fleet, "broadcast") as sync:
            await sync.push(version="one")
            with (
                spoiled(fleet.member("engine-1"), prepare_weight_update=EngineInternalError("the disk is on fire")),
                pytest.raises(DrivetrainError, match=r"engine-1: EngineInternalError: the disk is on fire"),
            ):
                await sync.push(version="never")
            await require_serves(fleet, "one")
            await sync.push(version="two")
        await require_serves(fleet, "two")


async def test_an_engine_that_dies_while_the_group_forms_is_named(model: Path) -> None:
    async with hosted_fleet(model) as (fleet, engines):
        member = fleet.member("engine-1")
        join = member.calls.init_weight_update_communicator

        async def killed(spec: CommunicatorSpec) -> None:
            kill_host(engines[1])
            await join(spec)

        async with WeightSync.connect(await tensors_for(fleet), fleet, "broadcast") as sync:
            with spoiled(member) as calls:
                calls.instead["init_weight_update_communicator"] = killed
                async with within(seconds=BOUND):
                    with pytest.raises(MemberLost, match="engine-1"):
                        await sync.push(version="one")
            await require_serves(fleet, "initial")
            await sync.push(version="two")
        await require_serves(fleet, "two")


async def test_a_holder_of_the_fleet_cannot_broadcast(model: Path) -> None:
    async with Fleet([local(model), local(model)]) as fleet:
        assert fleet.supports("weights_broadcast")
        holder = await attach(await fleet.handle())
        with pytest.raises(UnsupportedCapability, match="broadcast"):
            async with WeightSync.connect(await tensors_for(holder), holder, "broadcast") as sync:
                await sync.push(version="never")
        await holder.teardown()
        await require_serves(fleet, "initial")


async def test_a_group_that_is_too_small_for_all_ranks_is_refused(model: Path) -> None:
    async with Fleet([local(model), local(model)]) as fleet:
        spec = CommunicatorSpec(
            master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo"
        )
        with pytest.raises(InvalidRequest, match="must have at least 3"):
            await fleet.init_weight_update_communicator(spec)
