"""A fleet in the place of a backend: every primitive is a call of one member, or of all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from drivetrain.backend.base import (
    Backend,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReadMedium,
    TokenDelta,
)
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState, WeightState
from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import DrivetrainError, EngineDied, EngineError, EngineInternalError, EngineStateError
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.prompts import MediaInput
from drivetrain.types.weights import (
    AbortUpdate,
    ApplyUpdate,
    BeginUpdate,
    CommitUpdate,
    CommunicatorSpec,
    LoadBuckets,
    LoraSource,
    PrepareUpdate,
    ReleaseSources,
    TensorData,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
    WeightUpdateRequest,
)
from drivetrain_fleet.agreement import (
    Facts,
    facts_of,
    fleet_config,
    fleet_model,
    native_stops,
    require_agreement,
    require_context,
)
from drivetrain_fleet.broadcast_groups import BroadcastGroups
from drivetrain_fleet.control import FleetAdapter, FleetControl
from drivetrain_fleet.failover import Failover
from drivetrain_fleet.fleet_weights import most_common, weights_of
from drivetrain_fleet.members import PATIENCE, Member, Members, described, named, no_member, on_each, require_some
from drivetrain_fleet.routing import Router, RoutingPolicy
from drivetrain_fleet.sending import Sending
from drivetrain_fleet.updates import FleetUpdates

_T = TypeVar("_T")


class FleetBackend(Backend):
    """The stand-in for a backend below a fleet's ``InferenceEngine``: several engines as one.

    ``InferenceEngine`` validates, tokenises, looks for stops and keeps the fleet's state, as over any backend. This
    class chooses the engine of each sample, and makes a change of all engines look like one change.

    Args:
        engines: The engines, by name.
        min_engines: Number of engines that must commit a weight update.
        max_staleness: Versions that an engine which missed updates may be behind and still serve.
        routing: The policy that spreads samples over the engines.
        max_waiting: Samples that may wait for an engine.
        max_samples_per_engine: Samples that one engine may have; None: any number.
        exact_failover: Stream tokens from the engines if all can, to know which samples have none.
        resume: Let samples go on from their tokens when their engine is lost.
    """

    name = "fleet"
    engine_distribution = "drivetrain"

    def __init__(
        self,
        engines: Mapping[str, InferenceEngine],
        *,
        min_engines: int,
        max_staleness: int,
        routing: RoutingPolicy,
        max_waiting: int,
        max_samples_per_engine: int | None,
        exact_failover: bool,
        resume: bool,
    ) -> None:
        super().__init__(fleet_config([engine.config for engine in engines.values()]))
        self.name = self.config.backend
        streams = all(Capability.STREAMING in engine.capabilities for engine in engines.values())
        resumes = resume and streams
        self.native_stops = frozenset() if resumes else native_stops(engines.values())
        self.members = Members()
        self.router = Router(routing)
        timeouts = self.config.timeouts
        self.control = FleetControl(
            self.members,
            PATIENCE * timeouts.control,
            evict=self._evict,
            cache_dropped=self.router.cache_dropped,
        )
        self.broadcasts = BroadcastGroups(self.members)
        self.updates = FleetUpdates(
            self.members,
            min_engines,
            max_staleness,
            PATIENCE * timeouts.weight_update,
            control=self.control,
            broadcasts=self.broadcasts,
            evict=self._evict,
            cache_dropped=self.router.cache_dropped,
        )
        self.sending = Sending(self.members, self.router, max_waiting, max_samples_per_engine, self._held)
        self.failover = Failover(self.sending, exact_failover and streams, resumes, self.updates.knows)
        self._facts: dict[str, Facts] = {}
        self._model: ModelInfo | None = None
        self._loading = asyncio.Lock()
        """Loading a model changes global state of its process, so engines in this process start one after another."""
        self._died: asyncio.Future[EngineError] | None = None
        for name, engine in engines.items():
            self.members.put(Member(name, engine, self._changed))

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset()  # a fleet's are those that its engines share

    # Members -----------------------------------------------------------------------------------------------------

    def _changed(self, member: Member) -> None:
        """Act on a change of a member's health."""
        status = member.status
        if status.failed:
            self.router.forget(member.name)
        elif status.started and not status.servable and not status.updating and not self._held():
            self._evict(member, status.describe())
        self.sending.changed()
        if self._died is not None and not self._died.done() and all(one.status.failed for one in self.members):
            self._died.set_result(EngineDied(f"every engine of the fleet has failed: {described(self.members)}"))

    def _held(self) -> bool:
        """Return True while no engine serves because of something that the fleet did or failed to do."""
        return (
            self.control.frozen is not None
            or MemoryTag.WEIGHTS in self.control.asleep
            or self.updates.failed
            or self.updates.under_way
        )

    def _evict(self, member: Member, why: str) -> None:
        self.failover.evict(member, why)

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        self._died = asyncio.get_running_loop().create_future()
        members = list(self.members)
        report(f"starting {len(members)} engines")
        await gather_or_cancel(self._start_engine(member.engine, member.name, report) for member in members)
        report("comparing the engines")
        self._facts = {member.name: await self._facts_of(member.engine) for member in members}
        require_agreement(self._facts)
        # Weights of an update that was not committed are of no version, and no measure for the other engines.
        committed = [member for member in members if member.engine.status.weights is WeightState.CLEAN] or members
        found = [weights_of(member.engine) for member in committed]
        measure = most_common(found)
        self.updates.serve(found[measure])
        for member in members:
            self._enter(member, known=member is committed[measure])
        await self.control.align_all()
        self.counts_resumed_tokens = all(member.counts_resumed_tokens for member in members)
        self._model = fleet_model([member.engine.model_info for member in members])
        return replace(self._model, weight_version=self.updates.weights.version)

    async def _start_engine(self, engine: InferenceEngine, name: str, report: Callable[[str], None]) -> None:
        def tell(stage: str) -> None:
            report(f"{name}: {stage}")

        if engine.state is EngineState.CREATED:
            if engine.isolation is Isolation.INLINE:
                async with self._loading:
                    await engine.start(tell)
            else:
                await engine.start(tell)
        elif engine.state in (EngineState.FAILED, EngineState.CLOSED, EngineState.STARTING):
            raise EngineStateError(
                f"{name} is {engine.status.describe()}; a fleet takes engines that are open or were not started",
                state=engine.state.value,
            )
        else:
            seconds = min(engine.config.timeouts.weight_update, self.config.timeouts.start / 2)
            await _update_ended(engine, seconds, tell)

    @staticmethod
    async def _facts_of(engine: InferenceEngine) -> Facts:
        return await facts_of(engine, await asyncio.to_thread(engine.tokenizer.fingerprint))

    def _enter(self, member: Member, *, known: bool = False) -> None:
        """Let a started engine's member take requests, if its weights are known to be the fleet's."""
        engine, weights, has = member.engine, self.updates.weights, weights_of(member.engine)
        stale = ""
        if engine.status.weights is WeightState.DIRTY:
            stale = f"its weights are dirty: {engine.status.why}"
        elif not known and not has.known_as(weights):
            stale = (
                f"it joined with the version {has.version!r} of {has.origin}; the fleet serves {weights.version!r} of "
                f"{weights.origin}"
            )
        member.move_to(member.status.start(has.version, engine.parts.weights.update_id, stale=stale))
        member.watch()

    async def start_member(self, name: str, engine: InferenceEngine, report: Callable[[str], None]) -> Member:
        """Start an engine that joins the fleet, and compare it with the others; it gets no calls until then."""
        assert self._model is not None
        member = Member(name, engine, self._changed)
        self.members.put(member)
        try:
            await self._start_engine(engine, name, report)
            self._facts[name] = await self._facts_of(engine)
            require_agreement(self._facts)
            require_context(name, engine.model_info, self._model)
        except BaseException:
            self.forget(member)
            raise
        return member

    async def join(self, member: Member) -> None:
        """Let a started engine join."""
        await self.control.align(member)
        self._enter(member)

    async def drain(self, member: Member) -> None:
        """Wait until a member has no sample of the fleet; it gets no new one."""
        if not member.status.failed:
            member.move_to(member.status.drain())
        await self.sending.drained(member)

    def forget(self, member: Member) -> None:
        """Let a member leave that has no samples."""
        member.unwatch()
        self.members.pop(member.name)
        self._facts.pop(member.name, None)
        self.router.forget(member.name)
        self.sending.changed()

    async def close(self) -> None:
        for member in self.members:
            member.unwatch()
        outcomes = await on_each(self.members, lambda member: member.engine.teardown())
        await asyncio.to_thread(self.control.kept.close)
        if outcomes.failed:
            raise named(outcomes.failed, "teardown()")

    async def died(self) -> EngineError:
        assert self._died is not None
        return await asyncio.shield(self._died)

    async def stats(self) -> EngineStats:
        outcomes = await on_each(self.members.serving, lambda member: member.calls.stats())
        self._require_all(outcomes.refused, "stats()")
        found = outcomes.done.values()
        return EngineStats(
            running=sum(one.running for one in found),
            waiting=sum(one.waiting for one in found) + self.sending.waiting,
            kv_cache_bytes=sum(one.kv_cache_bytes for one in found),
            weight_bytes=sum(one.weight_bytes for one in found),
        )

    def _require_all(self, refused: Mapping[Member, DrivetrainError], action: str) -> None:
        require_some(self.members)
        if refused:
            raise named(dict(refused), action)

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result: GenerateResult | None = None
        async with aclosing(self.failover.steps(request, exact=self.failover.exact)) as deltas:
            async for delta in deltas:
                result = delta.result
        if result is None:
            raise EngineInternalError(f"request {request.request_id}: the stream of an engine ended without a result")
        return result

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        return self.failover.steps(request)

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        return await self._any("read_media()", lambda member: member.calls.read_media(media))

    async def abort(self, request_ids: list[str]) -> None:
        await self.failover.abort(request_ids)

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return await self._any("encode()", lambda member: member.calls.embed(prompts, dimensions))

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        return await self._any("score()", lambda member: member.calls.reward_score(sequences))

    async def _any(self, action: str, call: Callable[[Member], Awaitable[_T]]) -> _T:
        """Ask the least loaded member that serves, and another one if it dies. For calls that may be made twice."""
        while True:
            member = self.members.least_loaded(action)
            member.load.taken += 1
            try:
                return await call(member)
            except EngineDied as error:
                member.fail(str(error))

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        # After a failed update no engine may resume, even if another one fails to freeze.
        await self.control.freeze(mode, undo=not self.updates.failed)

    async def unfreeze(self) -> None:
        await self.control.unfreeze()

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        await self.control.sleep(tags)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await self.control.wake_up(tags)

    async def reset_prefix_cache(self) -> None:
        if not self.updates.under_way:  # each engine resets its own cache when it commits
            await self.control.reset_prefix_cache()

    async def clear_hicache_storage(self) -> None:
        await self.control.clear_hicache_storage()

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        while True:
            require_some(self.members)
            member = self.members.serving[0]
            try:
                return await member.calls.weight_manifest()
            except EngineDied as error:
                member.fail(str(error))

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        match message:
            case PrepareUpdate():
                return await self.updates.prepare(message.request)
            case BeginUpdate():
                return await self.updates.begin()
            case LoadBuckets():
                return await self.updates.load(message.indices)
            case VerifyUpdate():
                return WeightReply()  # each engine verifies when it commits
            case CommitUpdate():
                return await self.updates.commit(message.version)
            case AbortUpdate():
                return await self.updates.abort()
            case ReleaseSources():
                return await self.updates.release_sources()

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        return await self.updates.apply(update.version, update.freeze)

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        await self.broadcasts.join(spec)

    async def destroy_communicator(self, group_name: str) -> None:
        await self.broadcasts.leave(group_name)

    async def validate_weights(self) -> WeightReport:
        outcomes = await on_each(self.members.synced, lambda member: member.calls.validate_weights())
        self._require_all(outcomes.refused, "validate_weights()")
        if not outcomes.done:
            raise no_member("validate_weights()", self.members)
        reports = outcomes.done.values()

        def of_any(names: Callable[[WeightReport], tuple[str, ...]]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(name for report in reports for name in names(report)))

        return WeightReport(
            checked=min(report.checked for report in reports),
            nan=of_any(lambda report: report.nan),
            infinite=of_any(lambda report: report.infinite),
            all_zero=of_any(lambda report: report.all_zero),
        )

    async def set_weight_version(self, version: str) -> None:
        await self._as_version(version, self.control.relabel(version))

    async def update_adapter(self, request: WeightUpdateRequest, source: LoraSource, pinned: bool) -> None:
        """Update an adapter on all members: each loads the new one beside its old one."""
        source = source.model_copy(update={"path": _absolute(source.path)})
        request = request.model_copy(update={"source": source})
        await self._as_version(request.version, self.control.update_adapter(request, source, pinned))

    async def _as_version(self, version: str, change: Awaitable[None]) -> None:
        """Serve the weights as another version if a change of the engines succeeds."""
        before = self.updates.weights
        self.updates.serve(replace(before, version=version))
        try:
            await change
        except BaseException:
            self.updates.serve(before)
            raise

    async def read_weight(self, name: str) -> TensorData:
        return await self._any("get_weights_by_name()", lambda member: member.calls.get_weights_by_name(name))

    async def save_sharded(self, path: str) -> None:
        await self._save("save_sharded_model()", lambda member: member.calls.save_sharded_model(path, None))

    async def save_remote(self, url: str) -> None:
        await self._save("save_remote_model()", lambda member: member.calls.save_remote_model(url, None))

    async def _save(self, action: str, call: Callable[[Member], Awaitable[None]]) -> None:
        member = self.members.least_loaded(action)
        try:
            await call(member)
        except EngineDied as error:
            member.fail(str(error))
            require_some(self.members)
            raise named({member: error}, action, "What it has written may be incomplete") from error

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await self.control.load_adapter(lora_name, FleetAdapter(_absolute(lora_path), pinned))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await self.control.unload_adapter(lora_name)


async def _update_ended(engine: InferenceEngine, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until no holder updates the engine's weights: an engine applies to its end what a killed fleet has sent.

    After ``seconds``, which must end before the fleet's start does, the engine is taken as it is, and is stale.
    """
    controller, changed = engine.parts.controller, asyncio.Event()
    controller.subscribe(changed.set)
    try:
        async with asyncio.timeout(seconds):
            while engine.state is EngineState.UPDATING:
                tell("waiting for a weight update of another holder to end")
                changed.clear()
                await changed.wait()
    except TimeoutError:
        tell(f"a weight update of another holder goes on after {seconds:g} s")
    finally:
        controller.unsubscribe(changed.set)


def _absolute(path: str) -> str:
    return os.path.abspath(path)
