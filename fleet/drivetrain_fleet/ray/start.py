"""Start engines in Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drivetrain.attached.engine import AttachedEngine
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineDied,
    EngineStartError,
    EngineStateError,
    InvalidConfig,
    from_wire,
    to_wire,
)
from drivetrain.types.config import EngineConfig
from drivetrain_fleet.ray.actor import EngineActor, GpuKeeper
from drivetrain_fleet.ray.calls import call, make
from drivetrain_fleet.ray.engine import RayEngine
from drivetrain_fleet.ray.fleet import RayFleet
from drivetrain_fleet.ray.placement import Place, check_amount, gpus_of, places, require_one_node
from drivetrain_fleet.routing import RoutingPolicy

logger = logging.getLogger("drivetrain.fleet")

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_AS_GIVEN: Final = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Lets Ray leave ``CUDA_VISIBLE_DEVICES`` as the runtime environment gives it."""


class RayEngines:
    """Engines in Ray actors, in order; made by :func:`start_engines`.

    Use it as ``async with await start_engines(...) as engines``, or call :meth:`close`.
    """

    def __init__(self, engines: Sequence[RayEngine], keepers: Sequence[ActorHandle[object]]) -> None:
        self._engines = tuple(engines)
        self._keepers = tuple(keepers)

    def __iter__(self) -> Iterator[RayEngine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def __repr__(self) -> str:
        return f"<RayEngines {', '.join(engine.name for engine in self)}>"

    async def fleet(
        self,
        *,
        min_engines: int = 1,
        max_staleness: int = 0,
        routing: RoutingPolicy | None = None,
        max_waiting: int = 1 << 16,
        max_samples_per_engine: int | None = None,
        exact_failover: bool = True,
    ) -> RayFleet:
        """Attach to every engine and make a fleet of them: ``async with await engines.fleet() as fleet``.

        The arguments are those of :class:`drivetrain_fleet.InferenceEngineClient`.

        Raises:
            InvalidConfig: A number is out of its range.
            EngineDied: An actor has ended, and Ray does not make it anew.
            DeadlineExceeded: An actor did not answer in time.
        """
        attached: dict[str, AttachedEngine] = {}

        async def attach(engine: RayEngine) -> None:
            attached[engine.name] = await engine.attach()

        try:
            await gather_or_cancel(attach(engine) for engine in self)
            return RayFleet(
                self._engines,
                [attached[engine.name] for engine in self],
                min_engines=min_engines,
                max_staleness=max_staleness,
                routing=routing,
                max_waiting=max_waiting,
                max_samples_per_engine=max_samples_per_engine,
                exact_failover=exact_failover,
            )
        except BaseException:
            for page in attached.values():
                await page.teardown()
            raise

    async def close(self) -> None:
        """Close the engines and end their actors; idempotent."""
        await asyncio.gather(*(_close(engine) for engine in self))
        self.kill()

    def kill(self) -> None:
        """End the actors without closing their engines; Ray makes none anew."""
        for actor in (*(engine.actor for engine in self), *self._keepers):
            ray.kill(actor, no_restart=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _close(engine: RayEngine) -> None:
    try:
        async with deadline(2 * engine.config.timeouts.close, f"{engine.name} to close"):
            await call(engine.actor, "close")
    except (DrivetrainError, RayError) as error:
        logger.info("%s is killed: %s", engine.name, error)


async def start_engines(
    config: EngineConfig | Mapping[str, object],
    count: int = 1,
    *,
    placement_group: PlacementGroup | None = None,
    bundle_indices: Sequence[int | Sequence[int]] | None = None,
    gpus_per_engine: float | None = None,
    cpus_per_engine: float = 1.0,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, object] | None = None,
    max_restarts: int = 3,
    actor_class: type[EngineActor] = EngineActor,
    actor_arguments: Sequence[object] = (),
) -> RayEngines:
    """Start engines in Ray actors, one in each; return them when all are ready.

    Args:
        config: Configuration of every engine. Folders must exist on the engines' nodes.
        count: Number of engines.
        placement_group: Bundles for the engines; None: Ray chooses a node for each.
        bundle_indices: For each engine the index of its bundle, or the indices of several bundles of one node, whose
            GPUs it takes together; None: the first bundles that have the GPUs.
        gpus_per_engine: GPUs of each engine; may be a part of one, such as 0.5. None: one for each rank, but none with
            ``device="cpu"`` or in a cluster without GPUs.
        cpus_per_engine: CPUs of each engine's actor.
        resources: Custom resources of each engine's actor.
        runtime_env: Ray's runtime environment of the actors.
        max_restarts: Times that Ray makes a dead actor anew; -1: always.
        actor_class: Class of the actors, with methods of its own beside those of :class:`EngineActor`.
        actor_arguments: Arguments of its constructor, after those of :class:`EngineActor`.

    Raises:
        EngineStateError: Ray is not initialised.
        InvalidConfig: An argument or a field of the configuration is wrong; no actor was made.
        EngineStartError: An engine did not start; the first line says why. All actors were ended.
        DeadlineExceeded: Ray has no room for an actor, or an engine took longer than ``timeouts.start``.
    """
    config = config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config)
    _check_whole("count", count, 1)
    _check_whole("max_restarts", max_restarts, -1)
    cpus = check_amount("cpus_per_engine", cpus_per_engine)
    if not ray.is_initialized():
        raise EngineStateError("Ray is not initialised in this process; call ray.init() first", state="created")
    gpus = gpus_of(config, gpus_per_engine)
    made = places(count, gpus, cpus, placement_group, bundle_indices)
    if placement_group is not None:
        await _reserved(placement_group, config.timeouts.start)
        require_one_node(made, placement_group_table(placement_group)["bundles_to_node_id"])
    starting = _Starting(
        config,
        placement_group,
        cpus,
        dict(resources or {}),
        dict(runtime_env or {}),
        max_restarts,
        partial(make, actor_class),
        tuple(actor_arguments),
    )
    try:
        engines = await gather_or_cancel(
            starting.engine(f"engine-{number}", place) for number, place in enumerate(made)
        )
    except BaseException:
        starting.undo()
        raise
    return RayEngines(engines, starting.keepers)


def _check_whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(f"{name}={shown(value)}: expected a whole number from {least}", field=name)


async def _reserved(group: PlacementGroup, seconds: float) -> None:
    """Wait until Ray has reserved a placement group's bundles."""
    bundles = ", ".join(str(dict(spec)) for spec in group.bundle_specs)
    try:
        async with deadline(seconds, f"Ray to reserve the bundles {bundles}"):
            await group.ready()
    except RayError as error:
        raise InvalidConfig(f"placement_group: Ray has no such group: {error}", field="placement_group") from error


@dataclass(slots=True)
class _Starting:
    """Actors that are being made."""

    config: EngineConfig
    group: PlacementGroup | None
    cpus: float
    resources: dict[str, float]
    runtime_env: dict[str, object]
    max_restarts: int
    make_actor: Callable[..., ActorHandle[object]]
    arguments: tuple[object, ...]
    actors: list[ActorHandle[object]] = field(default_factory=list)
    keepers: list[ActorHandle[object]] = field(default_factory=list)

    async def engine(self, name: str, place: Place) -> RayEngine:
        """Make an engine's actor, and wait until the engine has started."""
        try:
            keepers = self._make_keepers(place)
            async with deadline(self.config.timeouts.start, f"Ray to make the actors of {name}; {self._asked(place)}"):
                kept = [gpu for keeper in keepers for gpu in _strings(await call(keeper, "gpus"))]
                engine = RayEngine(name, self._make_actor(place, keepers, kept), self.config)
                await call(engine.actor, "placement")
            await engine.handle()
        except (EngineDied, RayError) as error:
            raise EngineStartError(f"{name}: its actor ended before the engine had started: {error}") from error
        except DeadlineExceeded:
            raise
        except DrivetrainError as error:
            kind, message, fields = to_wire(error)
            raise from_wire(kind, f"{name}: {message}", fields) from error
        return engine

    def _make_keepers(self, place: Place) -> list[ActorHandle[object]]:
        if len(place.bundles) == 1:
            return []
        shared: dict[str, object] = {"num_cpus": 0, "max_restarts": -1}
        made = [make(GpuKeeper, shared | {"num_gpus": gpus} | self._in_bundle(index)) for index, gpus in place.bundles]
        self.keepers += made
        return made

    def _make_actor(self, place: Place, keepers: list[ActorHandle[object]], kept: list[str]) -> ActorHandle[object]:
        environment = self.runtime_env
        if keepers:
            variables = environment.get("env_vars") or {}
            assert isinstance(variables, Mapping)
            environment = {**environment, "env_vars": {**variables, _VISIBLE: ",".join(kept), _AS_GIVEN: "1"}}
        options: dict[str, object] = {
            "num_cpus": self.cpus,
            "num_gpus": 0 if keepers else place.bundles[0][1],
            "resources": self.resources,
            "runtime_env": environment,
            "max_restarts": self.max_restarts,
        }
        options |= self._in_bundle(place.bundles[0][0])
        actor = self.make_actor(options, self.config, keepers, *self.arguments)
        self.actors.append(actor)
        return actor

    def _in_bundle(self, index: int) -> dict[str, object]:
        if self.group is None:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, index)}

    def _asked(self, place: Place) -> str:
        gpus = sum(share for _, share in place.bundles)
        asked = ", ".join(
            f"{amount:g} {name}" for name, amount in [("CPU", self.cpus), ("GPU", gpus), *self.resources.items()]
        )
        free = ray.available_resources()
        has = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in ("CPU", "GPU", *self.resources))
        return f"it asks for {asked}, and the cluster has {has} free"

    def undo(self) -> None:
        """End all actors."""
        for actor in (*self.actors, *self.keepers):
            ray.kill(actor, no_restart=True)


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
