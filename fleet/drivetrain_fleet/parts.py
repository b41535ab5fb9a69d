"""The parts of an engine page that are others over a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.engine.adapters import Adapters
from drivetrain.engine.generation import Generation, Params, Prompts
from drivetrain.engine.loaded_adapters import LoadedLora
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.weights import LoraSource, WeightUpdateRequest
from drivetrain_fleet.backend import FleetBackend
from drivetrain_fleet.failover import SESSION


class FleetGeneration(Generation):
    """Names the session of each turn, so that one engine gets them all."""

    async def generate_turn(
        self,
        session_id: str,
        prompts: Prompts,
        sampling_params: Params,
        *,
        parent_request_id: str | None,
        turn: TurnMode,
        request_ids: Sequence[str] | None,
        timeout: float | None,
    ) -> GenerationOutput:
        token = SESSION.set(session_id)
        try:
            return await super().generate_turn(
                session_id,
                prompts,
                sampling_params,
                parent_request_id=parent_request_id,
                turn=turn,
                request_ids=request_ids,
                timeout=timeout,
            )
        finally:
            SESSION.reset(token)


class FleetAdapters(Adapters):
    """Lets each engine replace an adapter, which it does beside the old one and under the same name."""

    async def update(self, request: WeightUpdateRequest, source: LoraSource) -> None:
        name, what = source.lora_name, f"an update of the adapter {source.lora_name!r}"
        controller = self.controller
        assert isinstance(self.backend, FleetBackend)
        self.updates.require_update_from(source.kind)
        async with controller.owning_weights(what), controller.controlling(what):
            controller.status.require_weights(what)
            old = self.loaded.find(name)
            if old is None:
                self.loaded.require_room()
            self._refuse_users(name, request.mode)
            self.pauses.refuse_waiting_for_frozen(request.mode)
            before = controller.status
            controller.move_to(before.begin_update())
            try:
                if self.in_flight.running_with_lora(name):
                    await self.updates.quiesce(request.mode)
                pinned = old is not None and old.pinned
                await self.backend.update_adapter(request, source, pinned)
                self.loaded.put(name, LoadedLora(name, pinned))
                self.weights.publish(request.version)
            finally:
                controller.move_to(before)


__all__ = ["FleetAdapters", "FleetGeneration"]
