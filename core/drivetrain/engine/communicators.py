"""The torch.distributed groups in which trainers broadcast weights to an engine."""

from __future__ import annotations

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.controller import Controller
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.weights import CommunicatorSpec


class Communicators:
    """Joins and leaves groups, and knows the names of those that were joined."""

    def __init__(self, controller: Controller, backend: Backend) -> None:
        self.controller = controller
        self.backend = backend
        self._groups: set[str] = set()

    async def join(self, spec: CommunicatorSpec) -> None:
        """Join a group; see ``InferenceEngine.init_weight_update_communicator``."""
        self.controller.require("init_weight_update_communicator()", Capability.WEIGHTS_BROADCAST)
        if spec.group_name in self._groups:
            raise InvalidRequest(
                f"the engine is in a group {spec.group_name!r} already; leave it first", field="group_name"
            )
        longest = self.controller.config.timeouts.weight_update
        self._groups.add(spec.group_name)
        try:
            async with deadline(longest, f"the group {spec.group_name!r} to form"):
                await self.backend.init_communicator(spec.model_copy(update={"timeout": min(spec.timeout, longest)}))
        except BaseException:
            self._groups.discard(spec.group_name)
            raise

    async def leave(self, group_name: str) -> None:
        """Leave a group; see ``InferenceEngine.destroy_weight_update_communicator``."""
        self.controller.require("destroy_weight_update_communicator()", Capability.WEIGHTS_BROADCAST)
        self._groups.discard(group_name)
        async with self.controller.bounded(f"the group {group_name!r} to dissolve"):
            await self.backend.destroy_communicator(group_name)
