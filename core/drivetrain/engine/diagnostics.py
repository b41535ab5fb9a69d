"""Statistics and profiles of a running engine."""

from __future__ import annotations

from drivetrain.backend.base import Backend, EngineStats
from drivetrain.engine.controller import Controller
from drivetrain.types.capability import Capability


class Diagnostics:
    """Asks the backend for statistics and profiles. It keeps no state."""

    def __init__(self, controller: Controller, backend: Backend) -> None:
        self.controller = controller
        self.backend = backend

    async def stats(self) -> EngineStats:
        """Return the requests that run and wait, and the memory held."""
        self.controller.status.require_open("stats()")
        async with self.controller.bounded("the engine's statistics"):
            return await self.backend.stats()

    async def start_profile(self, directory: str) -> None:
        """Start recording a profile into ``directory``."""
        self.controller.require("start_profile()", Capability.PROFILE)
        async with self.controller.bounded("the profile to start"):
            await self.backend.start_profile(directory)

    async def stop_profile(self) -> str:
        """Stop recording; return the path of the trace file."""
        self.controller.require("stop_profile()", Capability.PROFILE)
        async with self.controller.bounded("the profile to be written"):
            return await self.backend.stop_profile()
