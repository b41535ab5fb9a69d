"""Find the engines that Ray actors own, from the processes of verl's workers."""

from __future__ import annotations

import ray

from drivetrain.attached.engine import AttachedEngine, attach
from drivetrain.types.handle import EngineHandle
from drivetrain_fleet.ray.calls import call


async def attach_to(server: str) -> AttachedEngine:
    """Attach to the engine of a server, by the name of its Ray actor.

    Raises:
        DrivetrainError: The engine is gone, or does not answer.
    """
    handle = await call(ray.get_actor(server), "handle", ray.get_runtime_context().get_node_id())
    assert isinstance(handle, EngineHandle)
    return await attach(handle)
