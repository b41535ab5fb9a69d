"""Pause, sleep, caches and profiles."""

from __future__ import annotations

import os
from collections.abc import Iterable

from drivetrain.engine.api.page import Page
from drivetrain.types.arguments import checked
from drivetrain.types.modes import MemoryTag, PauseMode


class ControlCalls(Page):
    """Decide when the engine generates and which memory it holds."""

    @checked
    async def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT, *, timeout: float | None = None) -> None:
        """Pause; :class:`PauseMode` says what becomes of requests in flight. Idempotent.

        Raises:
            InvalidRequest: the mode is unknown; nothing changed.
            UnsupportedCapability: this engine cannot pause in this mode; nothing changed.
            DeadlineExceeded: requests in flight did not end in time; the engine is not paused.
        """
        await self.parts.pauses.pause(PauseMode(mode), timeout)

    async def continue_generation(self) -> None:
        """Let frozen and waiting requests go on. Idempotent."""
        await self.parts.pauses.resume()

    @checked
    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None = None,
        *,
        timeout: float | None = None,
        abort_first: bool = False,
        drain_timeout: float = 0.0,
    ) -> None:
        """Free memory. Only the arguments decide what happens to requests in flight.

        Args:
            tags: Kinds of memory; if not given, every kind that this engine can free.
            timeout: Seconds for freeing it.
            abort_first: Abort requests in flight. Requests frozen by ``pause_generation("retract")`` hold no cache
                and need not be aborted.
            drain_timeout: Seconds to let requests in flight end by themselves.

        Raises:
            EngineBusy: requests are still in flight after ``drain_timeout``; nothing changed.
        """
        await self.parts.pauses.sleep(tags, timeout, abort_first, drain_timeout)

    @checked
    async def wake_up(self, tags: Iterable[MemoryTag | str] | None = None, *, timeout: float | None = None) -> None:
        """Allocate memory again. Weights that were not kept must be updated before the engine serves."""
        await self.parts.pauses.wake_up(tags, timeout)

    async def reset_prefix_cache(self) -> None:
        """Discard every cached prefix."""
        await self.parts.pauses.reset_prefix_cache()

    async def clear_hicache_storage(self) -> None:
        """Clear the storage tier of a hierarchical cache."""
        await self.parts.pauses.clear_hicache_storage()

    @checked
    async def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Start recording a profile into ``directory``."""
        await self.parts.diagnostics.start_profile(os.fspath(directory))

    async def stop_profile(self) -> str:
        """Stop recording; return the path of the trace file."""
        return await self.parts.diagnostics.stop_profile()
