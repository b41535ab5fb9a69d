"""The parts of an ``InferenceEngine`` that are different over a fleet."""

from __future__ import annotations

from drivetrain.backend.base import GenerateRequest
from drivetrain.engine.adapters import Adapters
from drivetrain.engine.generation import Generation, Params, Prompts
from drivetrain.engine.loaded_adapters import LoadedLora
from drivetrain.engine.pause_and_sleep import PauseAndSleep
from drivetrain.engine.request_builder import CallOptions
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.types.modes import MemoryTag, TurnMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.weights import LoraSource, WeightUpdateRequest
from drivetrain_fleet.backend import FleetBackend
from drivetrain_fleet.failover import SESSION


class FleetGeneration(Generation):
    """Names the session of each turn, so that one engine gets them all.

    A backend's request has no session, so the name goes to the router in a context variable, which the tasks of the
    turn's samples inherit.
    """

    async def generate_turn(
        self,
        session_id: str,
        prompts: Prompts,
        sampling_params: Params,
        options: CallOptions,
        parent_request_id: str | None,
        turn: TurnMode,
    ) -> GenerationOutput:
        token = SESSION.set(session_id)
        try:
            return await super().generate_turn(session_id, prompts, sampling_params, options, parent_request_id, turn)
        finally:
            SESSION.reset(token)


class FleetRequests(RequestsInFlight):
    """Admits requests that are pinned to the version of any engine: a lagging one serves an earlier version."""

    def require_version(self, request: GenerateRequest) -> None:
        assert isinstance(self.backend, FleetBackend)
        self.backend.sending.require_version(request)


class FleetPauses(PauseAndSleep):
    """Wakes up every engine, also one that another holder of it has put to sleep."""

    sleeps_late = False  # the fleet wakes up the engines that have fallen asleep

    def to_wake(self, chosen: frozenset[MemoryTag]) -> frozenset[MemoryTag]:
        return chosen


class FleetAdapters(Adapters):
    """Lets each engine replace an adapter, which it does beside the old one and under the same name."""

    async def update(self, request: WeightUpdateRequest, name: str) -> None:
        assert isinstance(self.backend, FleetBackend)
        async with self._replacing(request, name) as old, self._without_users(request, name):
            pinned = old is not None and old.pinned
            assert isinstance(request.source, LoraSource)  # a fleet takes adapters from folders, which it keeps
            await self.backend.update_adapter(request, request.source, pinned)
            self._serve(request.version, name, LoadedLora(name, pinned))
