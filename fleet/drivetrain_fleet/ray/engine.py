"""An engine in a Ray actor, reached from any process of the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from drivetrain.attached.engine import AttachedEngine, attach
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.validation import check_seconds
from drivetrain.errors import EngineDied, EngineStartError
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain_fleet.ray.actor import Refusal
from drivetrain_fleet.ray.calls import call

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RayEngine:
    """An engine in a Ray actor. Ray can pass it to other actors and tasks, which attach to the engine.

    The engine ends with its actor, and the actor ends with the job that made it.
    """

    name: str
    actor: ActorHandle[object]
    """The actor that owns the engine."""
    config: EngineConfig

    async def handle(self, *, timeout: float | None = None) -> EngineHandle:
        """Return a handle to the engine for the processes of this node.

        On the engine's node it is a Unix socket, elsewhere a TCP address of the engine's node. If Ray is making the
        actor anew, wait for it.

        Args:
            timeout: Seconds to wait; ``timeouts.start`` if not given.

        Raises:
            EngineStartError: The engine did not start.
            EngineDied: The actor has ended, and Ray does not make it anew.
            DeadlineExceeded: The actor did not answer in time.
        """
        seconds = check_seconds(timeout, self.config.timeouts.start + self.config.timeouts.close)
        node = ray.get_runtime_context().get_node_id()
        async with deadline(seconds, f"the actor of {self.name} to start its engine"):
            answer = await self._answer(node)
        if isinstance(answer, Refusal):
            raise answer.error()
        assert isinstance(answer, EngineHandle)
        return answer

    async def _answer(self, node: str) -> object:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await call(self.actor, "handle", node)
            except ActorUnavailableError:  # Ray makes it anew
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            except RayTaskError as error:
                raise EngineStartError(f"the actor of {self.name} failed: {error.cause!r}") from error
            except RayError as error:
                raise EngineDied(f"the actor of {self.name} has ended: {error}") from error

    async def attach(self, *, timeout: float | None = None) -> AttachedEngine:
        """Attach to the engine; return its page, ready for use.

        Requests, tokens and weights go straight to the engine's process, not through Ray.

        Args:
            timeout: Seconds to wait for the actor; ``timeouts.start`` if not given.

        Raises:
            EngineStartError: The engine did not start.
            EngineDied: The actor has ended, and Ray does not make it anew.
            DeadlineExceeded: The actor did not answer in time.
        """
        return await attach(await self.handle(timeout=timeout))
