"""Generation over a fleet: the samples of a session's turns know their session, so that one engine gets them all."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.engine.generation import Generation, Params, Prompts
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain_fleet.failover import SESSION


class FleetGeneration(Generation):
    """Names the session of each turn."""

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


__all__ = ["FleetGeneration"]
