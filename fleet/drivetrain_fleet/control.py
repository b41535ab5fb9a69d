"""Pause, sleep and adapters of all engines of a fleet: all follow, or the call is undone and says who did not."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from drivetrain.errors import EngineBusy, EngineStateError, InvalidRequest
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import LoraSource, WeightUpdateRequest
from drivetrain_fleet.kept_adapters import KeptAdapters
from drivetrain_fleet.members import Member, Members, Outcomes, named, no_member, on_each, require_some

logger = logging.getLogger("drivetrain.fleet")

_UNDONE = "The others were put back"


@dataclass(frozen=True, slots=True)
class FleetAdapter:
    """A LoRA adapter that the fleet's engines have loaded."""

    path: str
    pinned: bool


class FleetControl:
    """Pauses, sleeps and relabels all engines of a fleet together, and loads adapters into all of them.

    Args:
        members: The fleet's members.
        seconds: Timeout of each call to a member.
        evict: Ends the samples of a member that is left behind.
        cache_dropped: Called for each member whose prefix cache was dropped.
    """

    def __init__(
        self,
        members: Members,
        seconds: float,
        *,
        evict: Callable[[Member, str], None],
        cache_dropped: Callable[[str], None],
    ) -> None:
        self.members = members
        self._seconds = seconds
        self.frozen: PauseMode | None = None
        """The mode in which the fleet has frozen its requests; None: they run."""
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.adapters: dict[str, FleetAdapter] = {}
        self.kept = KeptAdapters()
        self._evict = evict
        self._cache_dropped = cache_dropped
        self._putting_back: set[asyncio.Task[None]] = set()
        """Background tasks that undo calls whose caller was cancelled."""

    async def _on_each(self, members: Iterable[Member], call: Callable[[Member], Awaitable[None]]) -> Outcomes[None]:
        return await on_each(members, call, self._seconds)

    @asynccontextmanager
    async def _put_back_if_given_up(self, back: Callable[[], Awaitable[None]] | None) -> AsyncGenerator[None, None]:
        """Call ``back`` in the background if the work within is cancelled; the next change waits for it."""
        await self.settled()
        try:
            yield
        except asyncio.CancelledError:
            if back is not None:
                task = asyncio.ensure_future(_awaited(back))
                self._putting_back.add(task)
                task.add_done_callback(self._putting_back.discard)
            raise

    async def settled(self) -> None:
        """Wait until the calls that were cancelled earlier are undone."""
        while self._putting_back:
            await asyncio.wait(self._putting_back)

    def _with_requests(self) -> list[Member]:
        """Return the members that may have requests of the fleet."""
        return [member for member in self.members.serving if member.status.servable or member.load.samples]

    async def _undo(self, members: Iterable[Member], action: str, call: Callable[[Member], Awaitable[None]]) -> None:
        """Put members back; one that cannot be put back is stale."""
        self._left_over(await self._on_each(members, call), f"{action} could not be undone")

    def _left_over(self, outcomes: Outcomes[None], why: str) -> None:
        for member, error in outcomes.refused.items():
            self._leave_behind(member, f"{why}: {error}")

    def _leave_behind(self, member: Member, why: str) -> None:
        member.left_behind(why)
        self._evict(member, why)

    def _leave_lagging_behind(self, version: str) -> None:
        """Make lagging members stale: a version label may only reach members that have the fleet's weights."""
        for member in self.members.servable:
            if not member.status.synced:
                self._leave_behind(member, f"it lagged when the fleet's weights became {version!r}")

    def _require(self, outcomes: Outcomes[None], action: str, after: str, *, failing: bool = False) -> None:
        require_some(self.members)
        if outcomes.refused:
            raise named(outcomes.refused, action, after, failing=failing)

    # Pause -------------------------------------------------------------------------------------------------------

    async def hold(self, members: Iterable[Member], mode: PauseMode) -> Outcomes[None]:
        """Pause members."""

        async def pause(member: Member) -> None:
            member.held = True  # before the call, whose answer may be lost
            await member.calls.pause_generation(mode, None)

        return await self._on_each(members, pause)

    async def let_go(self, members: Iterable[Member]) -> Outcomes[None]:
        """Let members resume."""

        async def go_on(member: Member) -> None:
            await member.calls.continue_generation()
            member.held = False

        return await self._on_each(members, go_on)

    async def _let_all_go(self) -> None:
        held = [member for member in self.members.serving if member.held]
        self._left_over(await self.let_go(held), "a pause could not be undone")

    async def _hold_again(self) -> None:
        if self.frozen is not None:
            going = [member for member in self.members.servable if not member.held]
            self._left_over(await self.hold(going, self.frozen), "going on could not be undone")

    async def freeze(self, mode: PauseMode, *, undo: bool = True) -> None:
        """Freeze the requests of all members; if one refuses, unfreeze all, unless they must stay frozen."""
        back = self._let_all_go if undo and self.frozen is None else None
        async with self._put_back_if_given_up(back):
            outcomes = await self.hold(self._with_requests(), mode)
            if outcomes.refused and back is not None:
                await back()
        if not undo:
            self.frozen = mode
        self._require(outcomes, f"pause_generation({mode.value!r})", _UNDONE if back is not None else "")
        self.frozen = mode

    async def unfreeze(self) -> None:
        """Let the requests of all members go on; if one refuses, freeze all again."""
        async with self._put_back_if_given_up(self._hold_again):
            outcomes = await self.let_go(self.members.servable)
            if outcomes.refused:
                await self._hold_again()
        self._require(outcomes, "continue_generation()", _UNDONE)
        self.frozen = None
        for member in self._with_requests():
            if not member.status.servable:
                self._evict(member, member.status.describe())

    async def release(self, members: Iterable[Member]) -> None:
        """Unfreeze the requests of members after a committed update; a member that cannot do so becomes stale."""
        self._left_over(await self.let_go(members), "it did not go on after an update")
        require_some(self.members)

    # Memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Let all members give memory back; if one refuses, wake the others up."""
        before = self.asleep
        new = tags - before

        async def back() -> None:
            if new:
                await self._undo(self.members.serving, "sleep", lambda member: member.calls.wake_up(new, None))
            self.asleep = before

        async with self._put_back_if_given_up(back):
            self.asleep |= tags
            outcomes = await self._on_each(
                self.members.serving, lambda member: member.calls.sleep(tags, None, False, 0.0)
            )
            if outcomes.refused:
                await back()
        self._require(outcomes, "sleep()", "The others were woken up", failing=True)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Let all members take memory again; call it again if one refuses."""
        await self.settled()
        outcomes = await self._on_each(self.members.serving, lambda member: member.calls.wake_up(tags, None))
        self._require(outcomes, "wake_up()", "The others are awake; call wake_up() again", failing=True)
        self.asleep -= tags

    async def reset_prefix_cache(self) -> None:
        """Clear every member's prefix cache."""
        outcomes = await self._on_each(self.members.serving, lambda member: member.calls.reset_prefix_cache())
        for member in outcomes.done:
            self._cache_dropped(member.name)
        self._require(outcomes, "reset_prefix_cache()", "The others have reset theirs; call it again")

    async def clear_hicache_storage(self) -> None:
        """Clear the storage tier of every member's cache."""
        outcomes = await self._on_each(self.members.serving, lambda member: member.calls.clear_hicache_storage())
        self._require(outcomes, "clear_hicache_storage()", "The others have cleared theirs; call it again")

    # Version -----------------------------------------------------------------------------------------------------

    async def relabel(self, version: str) -> None:
        """Give the weights of all members another version. If only some refuse, those become stale."""

        async def relabel(member: Member) -> None:
            with member.changing():
                await member.calls.update_weight_version(version)
                member.move_to(member.status.relabel(version))

        outcomes = await self._on_each(self.members.synced, relabel)
        if not outcomes.done:
            self._require(outcomes, "update_weight_version()", "No version was changed")
            raise no_member("update_weight_version()", self.members)
        self._left_over(outcomes, f"it did not take the version {version!r}")
        self._leave_lagging_behind(version)

    # Adapters ----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, adapter: FleetAdapter) -> None:
        """Load an adapter on all members; if one refuses, unload it from the others."""
        begun: set[Member] = set()

        async def load(member: Member) -> None:
            if name in member.foreign_adapters:
                if name in member.engine.parts.loaded_adapters.names:
                    await member.calls.unload_lora_adapter(name)
                member.foreign_adapters.discard(name)
            begun.add(member)
            await member.calls.load_lora_adapter(name, adapter.path, adapter.pinned)

        async def back() -> None:
            has = [one for one in self.members.servable if name in one.engine.parts.loaded_adapters.names]
            has = [one for one in has if one in begun]
            await self._undo(has, f"loading {name!r}", lambda member: member.calls.unload_lora_adapter(name))

        async with self._put_back_if_given_up(back):
            outcomes = await self._on_each(self.members.servable, load)
            if outcomes.refused:
                await back()
        self._require(outcomes, f"load_lora_adapter({name!r})", "No engine has it loaded")
        self.adapters[name] = adapter

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from all members; if one refuses, load it again on the others."""
        adapter = self.adapters.get(name)

        async def back() -> None:
            if adapter is not None:
                path, pinned = adapter.path, adapter.pinned
                lacks = [one for one in self.members.servable if name not in one.engine.parts.loaded_adapters.names]
                await self._undo(
                    lacks, f"unloading {name!r}", lambda member: member.calls.load_lora_adapter(name, path, pinned)
                )

        async with self._put_back_if_given_up(back):
            outcomes = await self._on_each(self.members.servable, lambda member: member.calls.unload_lora_adapter(name))
            if outcomes.refused:
                await back()
        self._require(outcomes, f"unload_lora_adapter({name!r})", "The others have it loaded again")
        self.adapters.pop(name, None)
        await asyncio.to_thread(self.kept.drop, name)

    async def update_adapter(self, request: WeightUpdateRequest, source: LoraSource, pinned: bool) -> None:
        """Replace an adapter on all members. If only some keep the old one, those become stale."""

        async def update(member: Member) -> None:
            with member.changing():
                await member.calls.update_adapter(request)
                member.move_to(member.status.relabel(request.version))

        outcomes = await self._on_each(self.members.synced, update)
        if not outcomes.done:
            self._require(outcomes, f"the update of the adapter {source.lora_name!r}", "No engine has it")
            raise no_member(f"the update of the adapter {source.lora_name!r}", self.members)
        self._left_over(outcomes, f"it did not take the adapter {source.lora_name!r} of {request.version!r}")
        self._leave_lagging_behind(request.version)
        path = await asyncio.to_thread(self.kept.keep, source.lora_name, source.path)
        self.adapters[source.lora_name] = FleetAdapter(path, pinned)

    async def align_all(self) -> None:
        """Give each synced member the fleet's adapters; one that refuses is stale until the next update."""
        outcomes = await self._on_each(self.members.synced, self.align)
        self._left_over(outcomes, "it has adapters that are not the fleet's")

    async def align(self, member: Member) -> None:
        """Give a member the fleet's adapters, and unload its own ones, except those that another holder uses.

        Those stay loaded: no request of the fleet can name one until the fleet loads an adapter of this name.
        """
        member.foreign_adapters.clear()
        for name in member.engine.parts.loaded_adapters.names:
            try:
                await member.calls.unload_lora_adapter(name)
            except EngineBusy as error:
                if name in self.adapters:
                    raise
                member.foreign_adapters.add(name)
                logger.warning("%s keeps the adapter %r of another holder: %s", member.name, name, error)
        for name, adapter in self.adapters.items():
            try:
                await member.calls.load_lora_adapter(name, adapter.path, adapter.pinned)
            except InvalidRequest as error:
                if await asyncio.to_thread(os.path.exists, adapter.path):
                    raise
                raise EngineStateError(
                    f"{member.name} cannot get the fleet's adapter {name!r}: its folder {adapter.path} is gone. Unload "
                    "the adapter, or update it from a folder that exists; then try again",
                    state=member.status.health.value,
                ) from error


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()
