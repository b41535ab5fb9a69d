"""Engines in Ray actors, on a cluster of two nodes that one machine simulates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import ray
from ray._raylet import PlacementGroupID
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from drivetrain import EngineDied, EngineStartError, EngineStateError, InvalidConfig, MemberLost, attach
from drivetrain.process.shared_engine import SharedEngine
from drivetrain_fleet import Health
from drivetrain_fleet.backend import FleetBackend
from drivetrain_fleet.members import Member
from drivetrain_fleet.ray import RayEngine, RayEngines, RayFleet, start_engines
from drivetrain_fleet.ray.placement import places, require_one_node
from drivetrain_weight_sync import WeightSync
from fleets import GREEDY, LONG, Spoiled, local, tensors_for, until

STARTED_S = 200.0
LOST_S = 60.0
"""Seconds in which everything that a lost node was asked has ended."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=1, num_gpus=2, resources={"second": 1})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def fields(model: Path, **more: object) -> dict[str, object]:
    return {"backend": "transformers", "model": str(model), "device": "cpu", "isolation": "inline", **more}


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[PlacementGroup]:
    group = placement_group([{"CPU": 1, "GPU": 1}] * 3, strategy="STRICT_PACK")
    yield group
    remove_placement_group(group)


@pytest.fixture(scope="module")
def pair(group: PlacementGroup, model: Path) -> Iterator[RayEngines]:
    """Two engines that are always made anew."""

    async def start() -> RayEngines:
        return await start_engines(
            fields(model), 2, placement_group=group, bundle_indices=[2, 0], gpus_per_engine=1, max_restarts=-1
        )

    engines = asyncio.run(start())
    yield engines
    asyncio.run(engines.close())


def member_of(fleet: RayFleet, name: str) -> Member:
    member = cast(FleetBackend, fleet.parts.backend).members.find(name)
    assert member is not None
    return member


def health(fleet: RayFleet) -> dict[str, str]:
    return {one.name: one.health.value for one in fleet.members}


async def placement(engine: RayEngine) -> tuple[str, int, str | None]:
    found: tuple[str, int, str | None] = await cast(Any, engine.actor).placement.remote()
    return found


async def push(fleet: RayFleet, version: str) -> None:
    async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
        await sync.push(version=version)


async def until_anew(fleet: RayFleet, name: str, health: Health) -> None:
    await started(lambda: any(one.name == name and one.health is health for one in fleet.members))


async def started(condition: Callable[[], bool]) -> None:
    """Wait for what takes as long as an actor and its engine take to start."""
    async with asyncio.timeout(STARTED_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


def trainer() -> Any:
    # Defined in a function, so that Ray sends it by value: its workers cannot import tests.
    class Trainer:
        async def push(self, target: Any, version: str) -> str:
            import torch

            from drivetrain import EngineHandle, attach
            from drivetrain_weight_sync import WeightSync

            engine = await attach(target) if isinstance(target, EngineHandle) else await target.attach()
            manifest = await engine.weight_manifest()
            tensors = {
                spec.name: torch.full(spec.shape, 0.01, dtype=getattr(torch, spec.dtype)) for spec in manifest.tensors
            }
            async with WeightSync.connect(tensors, engine) as sync:
                strategy = (await sync.push(version=version)).strategy
            await engine.teardown()
            return str(strategy.value)

    return ray.remote(Trainer).options(num_cpus=0).remote()


# Serving ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_fleet_of_actors_gives_the_tokens_of_an_engine_here(pair: RayEngines, model: Path) -> None:
    async with local(model) as engine, await pair.fleet(min_engines=2) as fleet:
        tensors = await tensors_for(fleet)
        for target in (engine, fleet):
            async with WeightSync.connect(tensors, target) as sync:
                await sync.push(version="same")
        expected = [one.token_ids for one in (await engine.generate(["hello", "bye"], GREEDY)).completions]
        found = await fleet.generate(["hello", "bye"], GREEDY)
        assert [one.token_ids for one in found.completions] == expected
        streamed = [chunk async for chunk in fleet.generate_stream("hello", GREEDY)]
        assert [token for chunk in streamed for token in chunk.token_ids] == expected[0]
        assert health(fleet) == {"engine-0": "ready", "engine-1": "ready"}


@pytest.mark.slow
async def test_an_actor_pushes_to_an_engine_that_it_was_given(pair: RayEngines) -> None:
    engine = next(iter(pair))
    page = await engine.attach()
    assert await trainer().push.remote(engine, "given") == "shared_memory"
    await until(lambda: page.get_weight_version() == "given")
    output = await page.generate("hello", GREEDY)
    assert {span.version for one in output.completions for span in one.weight_versions} == {"given"}
    await page.teardown()


@pytest.mark.slow
async def test_an_actor_pushes_to_all_engines_by_the_handle_of_the_fleet(pair: RayEngines) -> None:
    async with await pair.fleet(min_engines=2) as fleet:
        await trainer().push.remote(await fleet.handle(), "to all")
        assert [(one.health, one.version) for one in fleet.members] == [(Health.READY, "to all")] * 2


# Placement -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_engines_take_the_gpus_of_their_bundles(pair: RayEngines, group: PlacementGroup, model: Path) -> None:
    seen = [(await placement(engine))[2] for engine in pair]
    assert None not in seen
    assert len(set(seen)) == 2
    async with await start_engines(
        fields(model), 1, placement_group=group, bundle_indices=[1], gpus_per_engine=1
    ) as third:
        assert {*seen, *[(await placement(engine))[2] for engine in third]} < {"0", "1", "2", "3"}


@pytest.mark.slow
async def test_one_engine_takes_the_gpus_of_two_bundles_of_another_node(cluster: Cluster, model: Path) -> None:
    group = placement_group([{"GPU": 1, "CPU": 0.5, "second": 0.1}, {"GPU": 1, "second": 0.1}])
    try:
        async with await start_engines(
            fields(model), 1, placement_group=group, bundle_indices=[(0, 1)], gpus_per_engine=2, cpus_per_engine=0.5
        ) as engines:
            (engine,) = engines
            node, _, visible = await placement(engine)
            assert sorted((visible or "").split(",")) == ["0", "1"]
            assert node != ray.get_runtime_context().get_node_id()
            handle = await engine.handle()
            assert handle.address.startswith(f"tcp://{ray.util.get_node_ip_address()}:")
            page = await attach(handle)
            assert await trainer().push.remote(engine, "from elsewhere") == "shared_memory"
            await until(lambda: page.get_weight_version() == "from elsewhere")
            await page.teardown()
    finally:
        remove_placement_group(group)


@pytest.mark.slow
async def test_an_engine_of_another_node_joins_the_fleet(pair: RayEngines, model: Path) -> None:
    there = await start_engines(fields(model), gpus_per_engine=0, resources={"second": 0.1})
    async with there, await pair.fleet(min_engines=2) as fleet:
        (engine,) = there
        assert await fleet.join(engine) == "engine-2"
        nodes = [(await placement(one))[0] for one in (*pair, engine)]
        assert nodes[0] == nodes[1] != nodes[2]
        await push(fleet, "on two nodes")
        assert [(one.health, one.version) for one in fleet.members] == [(Health.READY, "on two nodes")] * 3
        await fleet.generate([[i + 1, 2] for i in range(6)], GREEDY)
        assert all(member_of(fleet, one.name).load.taken > 0 for one in fleet.members)


# Actors that die -------------------------------------------------------------------------------------------------


async def kill(engine: RayEngine, how: str) -> None:
    if how == "ray.kill":
        ray.kill(engine.actor, no_restart=False)
    else:
        os.kill((await placement(engine))[1], 9)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
async def test_an_actor_that_dies_while_it_generates_is_made_anew_and_joins(pair: RayEngines, how: str) -> None:
    async with await pair.fleet(min_engines=2) as fleet:
        await push(fleet, "before")
        tasks = [asyncio.create_task(fleet.generate([[i + 1, 2]], LONG)) for i in range(4)]
        lost = member_of(fleet, "engine-0")
        backend = cast(FleetBackend, fleet.parts.backend)
        await until(lambda: sum(ticket.made > 0 for ticket in backend.sending.of(lost)) == 2)
        await kill(next(iter(pair)), how)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [one for one in ended if isinstance(one, BaseException)]
        assert all(isinstance(error, MemberLost) and error.member == "engine-0" for error in errors)
        assert len(errors) == 2
        await until_anew(fleet, "engine-0", Health.STALE)
        output = await fleet.generate([[1], [2], [3]], GREEDY)
        assert {span.version for one in output.completions for span in one.weight_versions} == {"before"}
        assert member_of(fleet, "engine-0").load.taken == 0
        await push(fleet, "after")
        assert health(fleet) == {"engine-0": "ready", "engine-1": "ready"}
        output = await fleet.generate([[1], [2], [3], [4]], GREEDY)
        assert {span.version for one in output.completions for span in one.weight_versions} == {"after"}
        assert member_of(fleet, "engine-0").load.taken > 0


@pytest.mark.slow
async def test_an_actor_that_dies_in_a_push_joins_and_takes_the_next_one(pair: RayEngines) -> None:
    async with await pair.fleet() as fleet:
        await push(fleet, "before")
        member = member_of(fleet, "engine-1")
        calls = member.calls

        async def die_and_apply(*arguments: object) -> object:
            await kill(list(pair)[1], "SIGKILL")
            return await cast(Any, calls).apply_update(*arguments)

        member.calls = cast(SharedEngine, Spoiled(calls, apply_update=die_and_apply))
        await push(fleet, "meanwhile")
        assert health(fleet)["engine-0"] == "ready"
        await until_anew(fleet, "engine-1", Health.STALE)
        output = await fleet.generate([[1], [2]], GREEDY)
        assert {span.version for one in output.completions for span in one.weight_versions} == {"meanwhile"}
        await push(fleet, "after")
        assert [(one.health, one.version) for one in fleet.members] == [(Health.READY, "after")] * 2


@pytest.mark.slow
async def test_an_engine_that_dies_ends_its_actor_and_close_leaves_no_process(cluster: Cluster, model: Path) -> None:
    async with await start_engines(fields(model, isolation="process"), gpus_per_engine=0, max_restarts=1) as engines:
        (engine,) = engines
        first = (await placement(engine))[1]
        (host,) = hosts_of(first)
        os.kill(host, 9)
        await until(lambda: not psutil.pid_exists(first))
        page = await engine.attach()
        await page.generate("hello", GREEDY)
        await page.teardown()
        second = (await placement(engine))[1]
        left = [second, *hosts_of(second)]
        assert len(left) == 2
    await until(lambda: not any(psutil.pid_exists(pid) for pid in left))
    with pytest.raises(EngineDied, match="the actor of engine-0 has ended"):
        await engine.attach()


def hosts_of(pid: int) -> list[int]:
    """Return the host processes of an actor's process."""
    return [child.pid for child in psutil.Process(pid).children() if "drivetrain" in " ".join(child.cmdline())]


# Nodes that are lost ---------------------------------------------------------------------------------------------


class LostNode:
    """A node of the cluster that can be lost and come back, with the resource "lost" for one engine."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._node: Any = None

    def come(self) -> None:
        """Add the node. This blocks for seconds, and must be the main thread: Ray sets a signal handler."""
        self._node = self._cluster.add_node(num_cpus=1, resources={"lost": 1})

    def lose(self) -> None:
        """Kill all processes of the node at once, as a loss of power would.

        ``Cluster.remove_node`` would ask the raylet to end, and block the event loop while it does.
        """
        if self._node is not None:
            for _, daemon in self._node.live_processes():
                for pid in [daemon.pid, *(child.pid for child in _children(daemon.pid))]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
            self._node.kill_all_processes(check_alive=False, wait=False)  # takes the dead ones from Ray's books
            self._cluster.worker_nodes.remove(self._node)
            self._node = None


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def lost_node(cluster: Cluster) -> Iterator[LostNode]:
    node = LostNode(cluster)
    node.come()
    yield node
    node.lose()
    # Until Ray knows that the node is gone, it would place other tests' actors there.
    until_s = time.monotonic() + LOST_S
    while any(one["Alive"] and "lost" in one["Resources"] for one in ray.nodes()):
        assert time.monotonic() < until_s, "Ray still counts the lost node as alive"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["generating", "pushing"])
async def test_a_node_that_is_lost_takes_only_its_engine_and_comes_back(
    pair: RayEngines, model: Path, lost_node: LostNode, when: str
) -> None:
    there = await start_engines(
        fields(model), gpus_per_engine=0, cpus_per_engine=0.5, resources={"lost": 0.1}, max_restarts=-1
    )
    async with there, await pair.fleet() as fleet:
        (engine,) = there
        await fleet.join(engine, "there")
        await push(fleet, "before")
        lost = member_of(fleet, "there")
        serving = "before"
        if when == "generating":
            tasks = [asyncio.create_task(fleet.generate([[i + 1, 2]], LONG)) for i in range(6)]
            backend = cast(FleetBackend, fleet.parts.backend)
            await until(lambda: sum(ticket.made > 0 for ticket in backend.sending.of(lost)) == 2)
            lost_node.lose()
            async with asyncio.timeout(LOST_S):
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [one for one in ended if isinstance(one, BaseException)]
            assert all(isinstance(error, MemberLost) and error.member == "there" for error in errors)
            assert len(errors) == 2
        else:
            calls = lost.calls

            async def lose_and_apply(*arguments: object) -> object:
                lost_node.lose()
                return await cast(Any, calls).apply_update(*arguments)

            lost.calls = cast(SharedEngine, Spoiled(calls, apply_update=lose_and_apply))
            async with asyncio.timeout(LOST_S):
                await push(fleet, "meanwhile")
            serving = "meanwhile"
        await until(lambda: health(fleet)["there"] == "failed")
        output = await fleet.generate([[1], [2], [3]], GREEDY)
        assert {span.version for one in output.completions for span in one.weight_versions} == {serving}
        lost_node.come()
        await until_anew(fleet, "there", Health.STALE)
        await push(fleet, "after")
        assert health(fleet) == {"engine-0": "ready", "engine-1": "ready", "there": "ready"}
        output = await fleet.generate([[i + 1] for i in range(6)], GREEDY)
        assert {span.version for one in output.completions for span in one.weight_versions} == {"after"}
        assert member_of(fleet, "there").load.taken > 0


# Wrong uses ------------------------------------------------------------------------------------------------------


def bundles(*gpus: float) -> PlacementGroup:
    """Make a value that describes a placement group of these GPUs, one CPU in each bundle."""
    return PlacementGroup(PlacementGroupID.from_random(), [{"CPU": 1.0, "GPU": one} for one in gpus])


@pytest.mark.parametrize(
    ("count", "gpus", "group", "indices", "message"),
    [
        (3, 1, bundles(1, 1), None, "too few bundles: its 2 hold 2 of 3 engines"),
        (2, 2, bundles(1, 1, 1), None, "too few bundles: its 3 hold 1 of 2 engines"),
        (1, 1, bundles(1, 1), [2], "engine 0 has the index 2; the placement group has the bundles 0 to 1"),
        (1, 1, bundles(1, 1), [-1], "engine 0 has the index -1"),
        (1, 2, bundles(1, 1), [(0, 0)], "expected different indices"),
        (2, 1, bundles(1, 1), [0], "expected 2 entries, one for each engine"),
        (1, 2, bundles(1, 1), [0], "engine 0 takes 2 GPUs of bundle 0, which has 1 for it"),
        (2, 0.6, bundles(1), [0, 0], "engine 1 takes 0.6 GPUs of bundle 0, which has 0.4 for it"),
        (1, 0, bundles(1, 1), [(0, 1)], "engine 0 takes no GPU, and has 2 bundles"),
        (2, 0.5, bundles(1), [0, 0], "engine 1 takes 1 CPUs of bundle 0, which has 0 for it"),
        (1, 1, None, [0], "bundle_indices without placement_group"),
        (1, 1, "the group", None, "placement_group='the group'"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(
    count: int, gpus: float, group: Any, indices: Sequence[int | Sequence[int]] | None, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        places(count, gpus, 1.0, group, indices)


def test_engines_take_the_first_bundles_that_have_their_gpus() -> None:
    found = places(2, 2, 1.0, bundles(1, 0, 1, 4), None)
    assert [place.bundles for place in found] == [((0, 1.0), (2, 1.0)), ((3, 2.0),)]
    assert [place.bundles for place in places(2, 0.5, 0.5, bundles(1), [0, 0])] == [((0, 0.5),)] * 2


def test_bundles_of_two_nodes_are_no_place_for_one_engine() -> None:
    made = places(1, 2, 1.0, bundles(1, 1), None)
    with pytest.raises(InvalidConfig, match="bundle 0 on a, bundle 1 on b"):
        require_one_node(made, {0: "a", 1: "b"})


async def test_ray_must_be_initialised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineStateError, match=r"call ray\.init\(\) first"):
        await start_engines(fields(model))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count=0: expected a whole number from 1"),
        ({"max_restarts": -2}, "max_restarts=-2"),
        ({"cpus_per_engine": -1}, "cpus_per_engine=-1"),
        ({"gpus_per_engine": 1.5}, "gpus_per_engine=1.5: Ray gives whole GPUs, or a part of one"),
    ],
)
async def test_wrong_numbers_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        await start_engines(fields(model), **given)


def test_without_ray_the_extra_is_named() -> None:
    program = "import sys; sys.modules['ray'] = None; import drivetrain_fleet; import drivetrain_fleet.ray"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "MissingDependency: drivetrain_fleet.ray needs the package 'ray'" in done.stderr
    assert "pip install 'drivetrain[ray]'" in done.stderr


@pytest.mark.slow
async def test_the_error_of_a_start_says_what_the_engine_said(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    before = free()
    with pytest.raises(EngineStartError) as caught:
        await start_engines(fields(tmp_path / "model"), 2, gpus_per_engine=0.5, cpus_per_engine=0.5)
    first = str(caught.value).partition("\n")[0]
    assert first.startswith("engine-")
    assert "safetensors" in first
    await started(lambda: all(now >= then for now, then in zip(free(), before, strict=True)))


def free() -> list[float]:
    """Return how many CPUs and GPUs no actor has."""
    resources = ray.available_resources()
    return [resources.get(name, 0.0) for name in ("CPU", "GPU")]


@pytest.mark.slow
def test_the_example_rolls_out_and_pushes(cluster: Cluster) -> None:
    example = Path(__file__).parents[2] / "examples/ray_rollouts.py"
    done = subprocess.run(
        [sys.executable, str(example), "--steps", "2", "--address", str(cluster.address)],
        capture_output=True,
        text=True,
        timeout=STARTED_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2: 4 samples" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("engine-0: step-2, engine-1: step-2")
