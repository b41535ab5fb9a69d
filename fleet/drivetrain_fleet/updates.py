"""One weight update over all engines of a fleet.

Prepare on all, then apply at once on all. Then it is decided: if at least ``min_engines`` have committed, the version
is the fleet's, and every other engine is STALE. If fewer have, none serves: those that have committed have a version
that is not the fleet's. Requests in flight stay frozen until that decision, so no token is made with weights that the
fleet does not commit.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineDied,
    InvalidRequest,
    InvalidWeights,
    UnsupportedCapability,
    WeightBaseMismatch,
    WeightPlanMismatch,
    WeightSyncError,
    WeightTransferFailed,
)
from drivetrain.process.shared_engine import AppliedUpdate
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import BroadcastSource, DiskSource, WeightReply, WeightUpdateRequest
from drivetrain_fleet.broadcast_groups import BroadcastGroups, until_broken
from drivetrain_fleet.control import FleetControl
from drivetrain_fleet.fleet_weights import FleetWeights
from drivetrain_fleet.members import Member, Members, Outcomes, described, named, on_each, require_some

_T = TypeVar("_T")

_REFUSALS = (InvalidRequest, InvalidWeights, UnsupportedCapability, WeightBaseMismatch, WeightPlanMismatch)
"""Errors that say that the update itself is wrong: no engine takes it then."""


@dataclass(slots=True)
class _Update:
    """An update that members have prepared."""

    request: WeightUpdateRequest
    members: list[Member]
    """Members that still take part in the update."""
    lost: dict[Member, DrivetrainError] = field(default_factory=dict)
    """Members that were lost during the update, with their errors."""
    begun: bool = False
    stale: set[Member] = field(default_factory=set)
    """Members that were stale before."""
    nbytes: int = 0
    """Bytes loaded so far, bucket by bucket."""
    group: str | None = None
    """The group in which the buckets are broadcast: its members load together, or the collective does not end."""

    def drop(self, failed: dict[Member, DrivetrainError]) -> None:
        """Take members out of the update."""
        self.lost.update(failed)
        self.members = [member for member in self.members if member not in failed]


class FleetUpdates:
    """Runs the updates of a fleet. ``InferenceEngine`` calls it for one update at a time.

    Args:
        members: The fleet's members.
        min_engines: Number of members that must commit.
        max_staleness: Versions that a member which missed updates may be behind and still serve.
        seconds: Timeout of each step of a member.
        control: Pauses members, lets them go on, and gives them the fleet's adapters.
        broadcasts: Groups in which trainers broadcast to the members.
        evict: Ends the samples of a member that is left behind.
        cache_dropped: Called for each member whose prefix cache was dropped.
    """

    def __init__(
        self,
        members: Members,
        min_engines: int,
        max_staleness: int,
        seconds: float,
        *,
        control: FleetControl,
        broadcasts: BroadcastGroups,
        evict: Callable[[Member, str], None],
        cache_dropped: Callable[[str], None],
    ) -> None:
        self.members = members
        self.min_engines = min_engines
        self._max_staleness = max_staleness
        self._seconds = seconds
        self.weights = FleetWeights("", None)
        self.failed = False
        """True from a failed update until one is committed: no engine may serve."""
        self._known: set[str] = set()
        self._control = control
        self._broadcasts = broadcasts
        self._evict = evict
        self._cache_dropped = cache_dropped
        self._update: _Update | None = None
        self._breaking_off: set[asyncio.Task[None]] = set()

    async def _on_each(self, members: Iterable[Member], call: Callable[[Member], Awaitable[_T]]) -> Outcomes[_T]:
        return await on_each(members, call, self._seconds)

    def knows(self, version: str) -> bool:
        """Return True for a version that the fleet has committed."""
        return version in self._known

    def serve(self, weights: FleetWeights) -> None:
        """Name the weights that the fleet serves from now on."""
        self.weights = weights
        self._known.add(weights.version)

    # Prepare -----------------------------------------------------------------------------------------------------

    async def prepare(self, request: WeightUpdateRequest) -> WeightReply:
        """Let every member check and stage the update, while it serves on.

        Raises:
            WeightSyncError: Fewer than ``min_engines`` could stage it, or a member of its broadcast group could not;
                nothing was changed.
            DrivetrainError: A member refuses the update itself; nothing was changed.
        """
        self._update = None
        source = request.source
        group = source.group_name if isinstance(source, BroadcastSource) else None
        members = (self._broadcasts.members_of(group) if group is not None else None) or self.members.serving
        outcomes = await self._on_each(members, lambda member: member.calls.prepare_weight_update(request))
        require_some(self.members)
        refusals = _refusals(outcomes.failed)
        if refusals or len(outcomes.done) < self.min_engines or (group is not None and outcomes.failed):
            await self._on_each(outcomes.done, lambda member: member.calls.forget_weight_update())
            if refusals:
                raise named(refusals, f"the check of the update to {request.version!r}", "Nothing was changed")
            raise self._too_few(
                request.version, outcomes.failed, len(outcomes.done), "Nothing was changed", WeightSyncError
            )
        self._update = _Update(request, list(outcomes.done), outcomes.failed, group=group)
        plan = request.plan
        return WeightReply(buckets=0 if plan is None else len(plan.buckets))

    async def release_sources(self) -> WeightReply:
        """Let every member unmap the memory that trainers share."""
        self._update = None
        outcomes = await self._on_each(self.members.serving, lambda member: member.calls.release_weight_sources())
        if outcomes.refused:
            raise named(outcomes.refused, "release_weight_sources()")
        return WeightReply()

    # Apply at once -----------------------------------------------------------------------------------------------

    async def apply(self, version: str, freeze: PauseMode | None) -> WeightReply:
        """Apply the prepared update on all members at the same time, and decide."""
        update = self._begin()
        began = time.monotonic()

        async def apply(member: Member) -> AppliedUpdate:
            self._enter(update, member)
            applied = await member.calls.apply_update(None)
            await self._finish(update, member)
            return applied

        try:
            await self._control.settled()
            if freeze is not None:
                update.drop((await self._control.hold(update.members, freeze)).failed)
                self._require_enough(update)
            self._require_whole(update)
            outcomes = await self._on_each(update.members, self._together(update, apply))
            update.drop(outcomes.failed)
            self._decide(update)
        except BaseException:
            self._all_stale(update)
            raise
        await self._commit(update, version)
        seconds = time.monotonic() - began if freeze is not None else 0.0
        done = outcomes.done.values()
        return WeightReply(
            nbytes=max(applied.nbytes for applied in done),
            seconds=max(seconds, *(applied.paused_seconds for applied in done)),
        )

    # Bucket by bucket --------------------------------------------------------------------------------------------

    async def begin(self) -> WeightReply:
        """Let every member begin to overwrite its weights."""
        update = self._begin()

        async def begin(member: Member) -> int:
            self._enter(update, member)
            return await member.calls.begin_update(None)

        outcomes = await self._on_each(update.members, begin)
        self._without(update, outcomes.failed)
        if len(set(outcomes.done.values())) > 1:
            shown = ", ".join(f"{member.name}: {buckets}" for member, buckets in outcomes.done.items())
            raise WeightTransferFailed(
                f"the fleet's engines expect different numbers of buckets ({shown}); give the update a plan"
            )
        return WeightReply(buckets=next(iter(outcomes.done.values())))

    async def load(self, indices: tuple[int, ...]) -> WeightReply:
        """Let every member load these buckets."""
        update = self._begun()
        self._require_whole(update)

        async def load(member: Member) -> int:
            return await member.calls.load_buckets(list(indices))

        outcomes = await self._on_each(update.members, self._together(update, load))
        self._without(update, outcomes.failed)
        total = max(outcomes.done.values())
        loaded, update.nbytes = total - update.nbytes, total
        return WeightReply(nbytes=loaded)

    async def commit(self, version: str) -> WeightReply:
        """Let every member verify and commit, and decide."""
        update = self._begun()

        async def commit(member: Member) -> AppliedUpdate:
            applied = await member.calls.commit_update()
            await self._finish(update, member)
            return applied

        outcomes = await self._on_each(update.members, commit)
        self._without(update, outcomes.failed)
        self._decide(update)
        await self._commit(update, version)
        return WeightReply(seconds=max(applied.paused_seconds for applied in outcomes.done.values()))

    async def abort(self) -> WeightReply:
        """Drop the update; if it has begun, every engine is stale, and requests stay frozen."""
        update, self._update = self._update, None
        if update is None:
            return WeightReply()
        reason = f"the fleet's update to {update.request.version!r} was broken off"

        if update.begun:
            self._all_stale(update)
        await _break_off([*update.members, *update.lost], reason)
        while self._breaking_off:
            await asyncio.wait(self._breaking_off)
        return WeightReply()

    # The decision ------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """True from begin to commit."""
        return self._update is not None and self._update.begun

    def _begin(self) -> _Update:
        update = self._update
        if update is None:
            raise WeightSyncError("no update was prepared on the fleet's engines; prepare it again")
        update.begun = True
        return update

    def _enter(self, update: _Update, member: Member) -> None:
        if not member.status.servable:
            update.stale.add(member)
        member.move_to(member.status.begin_update())

    async def _finish(self, update: _Update, member: Member) -> None:
        """Give a member that was stale the fleet's adapters."""
        if member in update.stale:
            await self._control.align(member)

    def _begun(self) -> _Update:
        if self._update is None or not self._update.begun:
            raise WeightSyncError("no update was begun on the fleet's engines; begin one first")
        return self._update

    def _without(self, update: _Update, failed: dict[Member, DrivetrainError]) -> None:
        """Continue without members that failed a step, if enough are left."""
        update.drop(failed)
        if failed:  # in the background, so that the other members do not wait
            reason = "; ".join(str(error) for error in failed.values())
            task = asyncio.ensure_future(_break_off(failed, reason))
            self._breaking_off.add(task)
            task.add_done_callback(self._breaking_off.discard)
        self._require_enough(update)

    def _decide(self, update: _Update) -> None:
        """Raise unless enough engines have committed and live."""
        update.drop({m: WeightTransferFailed(m.status.describe()) for m in update.members if m.status.failed})
        self._require_enough(update)

    @staticmethod
    def _together(
        update: _Update, call: Callable[[Member], Coroutine[object, object, _T]]
    ) -> Callable[[Member], Coroutine[object, object, _T]]:
        """Return the call, such that no member waits in a broadcast for one that has failed."""
        return call if update.group is None else until_broken(call, update.group)

    def _require_whole(self, update: _Update) -> None:
        """Raise if the collective lacks a member: the others would wait for it."""
        require_some(self.members)
        if update.group is not None and update.lost:
            raise self._too_few(
                update.request.version,
                update.lost,
                len(update.members),
                "A broadcast must reach all engines of its group; push again, and a new group is formed. No engine "
                "serves until a complete update is committed",
            )

    def _require_enough(self, update: _Update) -> None:
        require_some(self.members)
        if len(update.members) < self.min_engines:
            raise self._too_few(
                update.request.version,
                update.lost,
                len(update.members),
                "No engine serves until a complete update is committed",
            )

    def _too_few(
        self,
        version: str,
        failed: dict[Member, DrivetrainError],
        left: int,
        after: str,
        otherwise: type[WeightSyncError] = WeightTransferFailed,
    ) -> DrivetrainError:
        """Return the error of an update that fewer than ``min_engines`` took: the engines' own, or ``otherwise``."""
        if not failed:
            return otherwise(
                f"the update to {version!r} reaches {left} engines, and min_engines={self.min_engines}; "
                f"{described(self.members)}. {after}"
            )
        after = f"{left} are left, and min_engines={self.min_engines}. {after}"
        # Lost members first: in a broadcast, the other members' failures follow from theirs.
        failed = dict(sorted(failed.items(), key=lambda one: not isinstance(one[1], EngineDied)))
        error = named(failed, f"the update to {version!r}", after)
        if isinstance(error, WeightSyncError | DeadlineExceeded):
            return error
        wrapped = otherwise(str(error))
        wrapped.__cause__ = error
        return wrapped

    async def _commit(self, update: _Update, version: str) -> None:
        """Publish the version for the fleet; members that did not commit it have missed it, and the others resume."""
        self._update = None
        update_id = update.request.update_id
        self.serve(FleetWeights(version, _folder(update.request), update_id))
        self.failed = False
        for member in update.members:
            member.move_to(member.status.commit(version, update_id))
            if not update.request.keep_prefix_cache:
                self._cache_dropped(member.name)
        going_on = list(update.members)
        for member in self.members.serving:
            if member not in update.members:
                error = update.lost.get(member)
                why = "it was not part of it" if error is None else f"{type(error).__name__}: {error}"
                why = f"it did not commit {version!r}: {why}"
                if member.missed(why, self._max_staleness):
                    going_on.append(member)
                else:
                    self._evict(member, why)
        if self._control.frozen is None:  # else the engine resumes them when it may
            await self._control.release([member for member in going_on if member.held])

    def _all_stale(self, update: _Update) -> None:
        self.failed = True
        for member in self.members.serving:
            member.left_behind(f"the fleet's update to {update.request.version!r} failed")


async def _break_off(members: Iterable[Member], reason: str) -> None:
    """Let members drop an update; each is done once its receiver has let go of it."""

    async def drop(member: Member) -> None:
        await member.calls.break_off_update(reason)
        await member.calls.forget_weight_update()

    await on_each([member for member in members if not member.status.failed], drop)


def _refusals(failed: dict[Member, DrivetrainError]) -> dict[Member, DrivetrainError]:
    """Return the errors that say that the update itself is wrong."""
    return {member: error for member, error in failed.items() if isinstance(error, _REFUSALS)}


def _folder(request: WeightUpdateRequest) -> str | None:
    """Return the folder that an update was read from; None if it came from memory."""
    return os.path.realpath(request.source.path) if isinstance(request.source, DiskSource) else None
