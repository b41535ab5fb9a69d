"""Pause, sleep and caches, as SkyRL calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict, Unpack

from drivetrain.engine.states import WeightState
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain_trainers.skyrl.page import Page


class SleepOptions(TypedDict, total=False):
    """Options of :meth:`ControlCalls.sleep`."""

    timeout: float
    abort_first: bool
    drain_timeout: float
    pause_mode: PauseMode | str | None


class WakeOptions(TypedDict, total=False):
    """Options of :meth:`ControlCalls.wake_up`."""

    timeout: float
    resume_generation: bool


class ControlCalls(Page):
    """SkyRL's calls that decide when the engine generates and which memory it holds."""

    async def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Pause: ``abort`` ends requests, ``in_place`` freezes them, ``retract`` also releases their cache.

        Raises:
            InvalidRequest: The mode is unknown.
            UnsupportedCapability: The engine cannot pause that way.
        """
        await self.engine.pause_generation(mode)

    async def continue_generation(self) -> None:
        """Let frozen and waiting requests go on."""
        await self.engine.continue_generation()

    async def abort_generation(self) -> None:
        """End every request with the tokens so far, and stay paused until :meth:`continue_generation`."""
        await self.engine.abort_generation()  # also those that wait at a pause
        await self.engine.pause_generation(PauseMode.ABORT)

    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None = None,
        timeout: float = 60.0,
        abort_first: bool = True,
        drain_timeout: float = 5.0,
        pause_mode: PauseMode | str | None = None,
    ) -> None:
        """Free memory.

        Args:
            tags: ``weights``, ``kv_cache``, ``cuda_graph``; None: every kind that the engine can free.
            timeout: Seconds for freeing it.
            abort_first: End every request first, with the tokens so far.
            drain_timeout: Seconds in which requests in flight must have ended.
            pause_mode: Pause in this mode, and stay paused, instead of ending requests: ``retract`` keeps them.

        Raises:
            EngineBusy: Requests are in flight after ``drain_timeout``; no memory was freed.
        """
        if pause_mode is not None:
            await self.engine.pause_generation(pause_mode)
        elif abort_first:
            await self.engine.abort_generation()
        await self.engine.sleep(tags, timeout=timeout, drain_timeout=drain_timeout)

    async def wake_up(
        self,
        tags: Iterable[MemoryTag | str] | None = None,
        timeout: float = 60.0,
        resume_generation: bool = True,
    ) -> None:
        """Allocate memory again; requests resume once all memory and the weights are back.

        Args:
            tags: As for :meth:`sleep`.
            timeout: Seconds for allocating it.
            resume_generation: If false, a pause is kept.
        """
        await self.engine.wake_up(tags, timeout=timeout)
        status = self.engine.status
        if resume_generation and not status.asleep and status.weights is WeightState.CLEAN:
            await self.engine.continue_generation()

    async def sleep_weights_only(self, **options: Unpack[SleepOptions]) -> None:
        """Free the weights' memory; the KV cache stays."""
        await self.sleep([MemoryTag.WEIGHTS], **options)

    async def wake_up_weights_only(self, **options: Unpack[WakeOptions]) -> None:
        """Allocate the weights' memory again."""
        await self.wake_up([MemoryTag.WEIGHTS], **options)

    async def sleep_all(self, **options: Unpack[SleepOptions]) -> None:
        """Free all memory that the engine can free."""
        await self.sleep(None, **options)

    async def wake_up_all(self, **options: Unpack[WakeOptions]) -> None:
        """Allocate all freed memory again."""
        await self.wake_up(None, **options)

    async def reset_prefix_cache(self) -> None:
        """Discard every cached prefix."""
        await self.engine.reset_prefix_cache()

    async def clear_hicache_storage(self) -> bool:
        """Clear the storage tier of a hierarchical cache.

        Raises:
            UnsupportedCapability: The engine has none.
        """
        await self.engine.clear_hicache_storage()
        return True
