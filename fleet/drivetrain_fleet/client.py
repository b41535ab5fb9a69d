"""Several engines as one: an ``InferenceEngine`` over a fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.engine.shared_state import EngineFacts
from drivetrain.engine.states import EngineState
from drivetrain.engine.validation import check_seconds
from drivetrain.errors import EngineStateError, InvalidConfig, InvalidRequest
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain_fleet.agreement import fleet_capabilities, fleet_isolation, require_capabilities
from drivetrain_fleet.backend import FleetBackend
from drivetrain_fleet.members import Member, MemberReport
from drivetrain_fleet.parts import FleetAdapters, FleetGeneration, FleetPauses, FleetRequests
from drivetrain_fleet.routing import RoutingPolicy

logger = logging.getLogger("drivetrain.fleet")

_KINDS: Final = PartKinds(
    generation=FleetGeneration, in_flight=FleetRequests, pauses=FleetPauses, adapters=FleetAdapters
)


class InferenceEngineClient(InferenceEngine):
    """Several engines as one engine, with the same methods.

    The engines may run in this process or in host processes, be attached by handle, and have different backends, if
    they serve one model. The fleet owns them: ``start`` starts each engine that was not started, and ``teardown``
    closes all of them; an attached engine is detached and goes on.

    Args:
        engines: The engines, in a sequence or by name.
        min_engines: Number of engines that must commit a weight update. If fewer do, the update fails and no engine
            serves until one is committed. Otherwise an engine that did not commit is stale, and gets no requests until
            the next complete update.
        max_staleness: Versions that an engine may be behind and still serve, if it missed weight updates and its
            weights are intact. Completions carry the version that made them. 0: such an engine is stale.
        routing: The policy that spreads samples over the engines.
        max_waiting: Samples that may wait for an engine; another one is refused with :class:`EngineBusy`.
        max_samples_per_engine: Samples that one engine may have at a time; the others wait in the fleet, and go to
            the first engine that has room. None: any number.
        exact_failover: Stream tokens from the engines also for calls that want whole completions, to know which samples
            have none when an engine is lost: they go to another one. If false, each sample that the engine had fails;
            that saves a message per token.
        resume: Let a sample that has tokens go on from them at another engine when its own is lost. If false, and for
            requests with a field that needs the interrupted state, such as a grammar, it fails with
            :class:`MemberLost`. The fleet looks for stop strings and stop regexes itself then.

    Raises:
        InvalidConfig: There is no engine, one is given twice, or a number is out of its range.
    """

    @checked
    def __init__(
        self,
        engines: Sequence[InferenceEngine] | Mapping[str, InferenceEngine],
        *,
        min_engines: int = 1,
        max_staleness: int = 0,
        routing: RoutingPolicy | None = None,
        max_waiting: int = 1 << 16,
        max_samples_per_engine: int | None = None,
        exact_failover: bool = True,
        resume: bool = False,
    ) -> None:
        by_name = _named(engines)
        _check_count("min_engines", min_engines, most=len(by_name))
        _check_count("max_staleness", max_staleness, least=0)
        _check_count("max_waiting", max_waiting)
        if max_samples_per_engine is not None:
            _check_count("max_samples_per_engine", max_samples_per_engine)
        if routing is not None and not isinstance(routing, RoutingPolicy):
            raise InvalidConfig(f"routing={shown(routing)}: expected a RoutingPolicy", field="routing")
        if not isinstance(exact_failover, bool):
            raise InvalidConfig(f"exact_failover={shown(exact_failover)}: expected a bool", field="exact_failover")
        if not isinstance(resume, bool):
            raise InvalidConfig(f"resume={shown(resume)}: expected a bool", field="resume")
        if resume and not exact_failover:
            raise InvalidConfig(
                "resume=True needs the tokens that exact_failover=False does not ask for; leave one of them out",
                field="resume",
            )
        backend = FleetBackend(
            by_name,
            min_engines=min_engines,
            max_staleness=max_staleness,
            routing=routing or RoutingPolicy(),
            max_waiting=max_waiting,
            max_samples_per_engine=max_samples_per_engine,
            exact_failover=exact_failover,
            resume=resume,
        )
        capabilities = fleet_capabilities(by_name.values(), backend.native_stops)
        super().__init__(
            backend.config,
            backend,
            capabilities=capabilities,
            isolation=fleet_isolation(by_name.values()),
            versions=_versions(by_name),
        )
        self.parts = _KINDS.build(backend.config, backend, capabilities)
        self._fleet = backend

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Start the engines that were not started, compare all, and get ready to serve.

        The fleet serves the weights that most engines have, or the first engine's if no others are more common. Engines
        have the same weights if one update brought them, or if they loaded the same folder, under the same version. The
        other engines are stale. Adapters that the engines have loaded are unloaded, except those that requests use.

        Raises:
            InvalidConfig: Two engines differ in their model, tokenizer or dtype.
            EngineStartError: An engine did not start.
            EngineStateError: An engine has failed or was closed.
            DeadlineExceeded: Starting took longer than ``timeouts.start``.
        """
        await super().start(progress)
        weights = self._fleet.updates.weights
        self.parts.weights.publish(weights.version, weights.update_id)

    async def teardown(self) -> None:
        """Close every engine, also those of a fleet that was never started; idempotent."""
        was_started = self.state is not EngineState.CREATED
        await super().teardown()
        if not was_started:
            await self._close_backend()

    @property
    def members(self) -> tuple[MemberReport, ...]:
        """The engines with their health, version and load, in the order in which they joined."""
        return tuple(member.report() for member in self._fleet.members)

    @property
    def engines(self) -> dict[str, InferenceEngine]:
        """The engines by name, in the order in which they joined."""
        return {member.name: member.engine for member in self._fleet.members}

    def _facts(self) -> EngineFacts:
        """Describe the fleet to holders, which are not told when its ranks change and so cannot broadcast to them."""
        facts = super()._facts()
        return replace(facts, capabilities=facts.capabilities - {Capability.WEIGHTS_BROADCAST.value})

    @property
    def weight_update_ranks(self) -> tuple[str, ...]:
        """Names of the workers of all engines that a broadcast of weights reaches, by rank."""
        return self._fleet.broadcasts.ranks

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that hold the weights of the engines that are in the fleet now."""
        return tuple(dict.fromkeys(gpu for member in self._fleet.members for gpu in member.engine.gpus))

    @checked
    async def add(self, engine: InferenceEngine, name: str | None = None) -> str:
        """Let an engine join; return its name.

        It is stale until the next complete weight update, unless its weights are known to be the fleet's: the same
        version, from the same update or the same folder. The fleet's adapters are loaded into it.

        Raises:
            InvalidConfig: Its model, tokenizer, dtype, context length or capabilities are not the fleet's; it is not
                taken, and stays as it is.
            EngineStateError: The fleet is not open, or sleeps; or the engine has failed or was closed.
        """
        name = name or self._unused_name()
        if self._fleet.members.find(name) is not None:
            raise InvalidConfig(f"name={shown(name)}: the fleet has an engine of this name", field="name")
        if any(member.engine is engine for member in self._fleet.members):
            raise InvalidConfig("engine: the fleet has this engine already", field="engine")
        require_capabilities(name, engine, self.capabilities)
        controller = self.parts.controller
        controller.status.require_open("add()")
        self._refuse_asleep()
        member = await self._fleet.start_member(name, engine, lambda stage: logger.info("%s", stage))
        try:
            async with controller.owning_weights("add()"), controller.controlling("add()"):
                controller.status.require_open("add()")
                self._refuse_asleep()
                await self._fleet.join(member)
        except BaseException:
            if not member.status.started:
                self._fleet.forget(member)
            raise
        return name

    def _refuse_asleep(self) -> None:
        if self.status.asleep:
            raise EngineStateError("add() is refused: the fleet is asleep; wake it up first", state=self.state.value)

    @checked
    async def remove(self, name: str, *, timeout: float | None = None) -> InferenceEngine:
        """Let an engine end the requests that it has, and leave; return it, open if it has not failed.

        Args:
            name: The engine's name.
            timeout: Seconds for its requests to end; ``timeouts.generate`` if not given. If they do not end, it stays,
                draining; call again to go on waiting.

        Raises:
            InvalidRequest: The fleet has no engine of this name.
            EngineStateError: It is the fleet's last one; tear the fleet down instead.
            DeadlineExceeded: Its requests did not end in time.
        """
        self.status.require_open("remove()")
        seconds = check_seconds(timeout, self.config.timeouts.generate)
        member = self._member(name)
        if all(one is member or one.status.draining for one in self._fleet.members):
            raise EngineStateError(
                f"remove({name!r}) is refused: no other engine stays; add one first, or tear the fleet down",
                state=self.state.value,
            )
        async with deadline(seconds, f"the requests of {name} to end"):
            await self._fleet.drain(member)
        controller = self.parts.controller
        async with controller.owning_weights("remove()"), controller.controlling("remove()"):
            self._fleet.forget(self._member(name))
        return member.engine

    def _member(self, name: str) -> Member:
        member = self._fleet.members.find(name)
        if member is None:
            known = ", ".join(one.name for one in self._fleet.members)
            raise InvalidRequest(f"name={shown(name)}: the fleet has no such engine; it has: {known}", field="name")
        return member

    def _unused_name(self) -> str:
        number = len(self._fleet.members)
        while self._fleet.members.find(f"engine-{number}") is not None:
            number += 1
        return f"engine-{number}"


def _named(engines: Sequence[InferenceEngine] | Mapping[str, InferenceEngine]) -> dict[str, InferenceEngine]:
    """Check the engines, and give names to those of a sequence."""
    if isinstance(engines, str) or not isinstance(engines, Sequence | Mapping):
        raise InvalidConfig(f"engines={shown(engines)}: expected a list of engines, or a mapping", field="engines")
    given: Iterable[tuple[object, object]]
    given = engines.items() if isinstance(engines, Mapping) else ((f"engine-{i}", one) for i, one in enumerate(engines))
    by_name: dict[str, InferenceEngine] = {}
    for name, engine in given:
        if not isinstance(name, str) or not name:
            raise InvalidConfig(f"engines: the name {shown(name)} is no name; expected a string", field="engines")
        if not isinstance(engine, InferenceEngine):
            raise InvalidConfig(f"engines: {name} is {shown(engine)}; expected an InferenceEngine", field="engines")
        for other, known in by_name.items():
            if known is engine:
                raise InvalidConfig(f"engines: {other} and {name} are one engine; give each once", field="engines")
        by_name[name] = engine
    if not by_name:
        raise InvalidConfig("engines is empty; a fleet has at least one engine", field="engines")
    return by_name


def _check_count(field: str, value: object, least: int = 1, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        expected = f"an integer from {least}" if most is None else f"{least} to {most}, the number of engines"
        raise InvalidConfig(f"{field}={shown(value)}: expected {expected}", field=field)


def _versions(engines: Mapping[str, InferenceEngine]) -> dict[str, str]:
    """Return the versions of all engines; where two differ, both."""
    versions: dict[str, list[str]] = {}
    for engine in engines.values():
        for distribution, version in engine.versions.items():
            known = versions.setdefault(distribution, [])
            if version not in known:
                known.append(version)
    return {distribution: ", ".join(known) for distribution, known in versions.items()}
