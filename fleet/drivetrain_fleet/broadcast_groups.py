"""The torch.distributed groups in which trainers broadcast weights to the ranks of all engines of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import DrivetrainError, EngineDied, InvalidRequest, WeightTransferFailed
from drivetrain.types.weights import CommunicatorSpec
from drivetrain_fleet.members import Member, Members, named, on_each, require_some

_T = TypeVar("_T")

GRACE_S: Final = 1.0
"""Seconds in which the other engines must end a broadcast once one has failed, and leave its group."""


class BroadcastGroups:
    """Lets all engines join one group, each at its own ranks, and keeps the list of each group's engines.

    The trainer is rank 0. The ranks of the first engine follow, then those of the second, in the order of the members.
    An engine that joins the fleet later is not in the group: the trainer sees that :attr:`ranks` has changed, and forms
    another one before it pushes.

    Args:
        members: The fleet's members.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self._groups: dict[str, list[Member]] = {}

    @property
    def ranks(self) -> tuple[str, ...]:
        """Names of the ranks of all engines that take updates; another engine of the same name has other names."""
        return tuple(
            f"{member.name} ({member.number}) {rank}"
            for member in self.members.serving
            for rank in member.engine.weight_update_ranks
        )

    def members_of(self, group_name: str) -> list[Member] | None:
        """Return the engines that joined a group; None if the fleet is in no group of that name."""
        return self._groups.get(group_name)

    async def join(self, spec: CommunicatorSpec) -> None:
        """Let every engine that takes updates join a group.

        Raises:
            InvalidRequest: The group is too small for the ranks of all engines.
            MemberLost: An engine died; the others leave again.
            EngineDied: Every engine has failed.
        """
        require_some(self.members)
        members = self.members.serving
        needed = spec.rank_offset + len(self.ranks)
        if spec.world_size < needed:
            raise InvalidRequest(
                f"world_size={spec.world_size}: the fleet's engines have {len(self.ranks)} ranks from "
                f"rank_offset={spec.rank_offset} on, so the group must have at least {needed}",
                field="world_size",
            )

        async def join(member: Member, offset: int) -> None:
            try:
                await member.calls.init_weight_update_communicator(spec.model_copy(update={"rank_offset": offset}))
            except EngineDied as error:
                member.fail(str(error))
                require_some(self.members)
                raise named({member: error}, f"forming the group {spec.group_name!r}") from error
            except DrivetrainError as error:
                raise named({member: error}, f"forming the group {spec.group_name!r}") from error

        offset, calls = spec.rank_offset, []
        for member in members:
            calls.append(join(member, offset))
            offset += len(member.engine.weight_update_ranks)
        try:
            await gather_or_cancel(calls)
        except BaseException:
            # Engines that have joined leave; the trainer leaves too, which ends the other engines' wait.
            await on_each(members, lambda one: one.calls.destroy_weight_update_communicator(spec.group_name), GRACE_S)
            raise
        self._groups[spec.group_name] = members

    async def leave(self, group_name: str) -> None:
        """Let the engines leave a group.

        Raises:
            InvalidRequest: The fleet is in no group of that name.
        """
        members = self._groups.pop(group_name, None)
        if members is None:
            raise InvalidRequest(f"the fleet is in no group {group_name!r}", field="group_name")
        outcomes = await on_each(
            [member for member in members if not member.status.failed],
            lambda member: member.calls.destroy_weight_update_communicator(group_name),
        )
        # An engine that was removed from the fleet may be closed, and has left every group then.
        refused = {member: error for member, error in outcomes.refused.items() if member in set(self.members)}
        if refused:
            raise named(refused, f"leaving the group {group_name!r}")


def until_broken(
    call: Callable[[Member], Awaitable[_T]], group_name: str
) -> Callable[[Member], Coroutine[object, object, _T]]:
    """Wrap a call in which engines take part in a broadcast: once one has failed, the others leave the group."""
    broken = asyncio.Event()

    async def guarded(member: Member) -> _T:
        calling = asyncio.ensure_future(call(member))
        breaking = asyncio.ensure_future(broken.wait())
        try:
            await asyncio.wait([calling, breaking], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                await asyncio.wait([calling], timeout=GRACE_S)
            if not calling.done():
                await on_each([member], lambda one: one.calls.destroy_weight_update_communicator(group_name), GRACE_S)
                await asyncio.wait([calling], timeout=GRACE_S)
            if not calling.done():
                raise WeightTransferFailed("it did not get all buckets, because another engine of its group failed")
            return calling.result()
        except BaseException:
            broken.set()
            raise
        finally:
            breaking.cancel()
            calling.cancel()

    return guarded
