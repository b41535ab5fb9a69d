"""Assigns samples to members: admission, the queue, and the choice of the next sample's member."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from drivetrain.backend.base import GenerateRequest
from drivetrain.checks.limits import SAMPLES_AT_ONCE
from drivetrain.errors import DrivetrainError, EngineBusy, WeightVersionGone
from drivetrain_fleet.health import Health
from drivetrain_fleet.members import Member, Members, no_member, require_some
from drivetrain_fleet.prefix_index import Blocks
from drivetrain_fleet.routing import Router, Work

NO_BLOCKS: Final = Blocks((), ())


@dataclass(slots=True, eq=False)
class Ticket:
    """A sample of the fleet on its way."""

    request: GenerateRequest
    work: Work
    member: Member | None = None
    """The member that has it."""
    left: int = 0
    """Its part of that member's load, in tokens."""
    made: int = 0
    """Tokens that the sample has; 1 if the fleet does not see them and there may be some."""
    aborted: bool = False
    evicted: str = ""
    """The reason for which the member must not continue this sample; empty if it may."""
    lost_by: dict[Member, DrivetrainError] = field(default_factory=dict)
    """Members that were lost while they held this sample, before it had a token."""
    waiter: asyncio.Future[None] | None = None
    """Set while the sample waits in the queue; done once it has a member or was aborted."""


class Sending:
    """Gives each sample to a member, or lets it wait in a bounded queue.

    Args:
        members: The fleet's members.
        router: Chooses among the members that take requests.
        most_waiting: Samples that may wait.
        most_samples: Samples that one member may have; None: any number.
        held: Returns True while the fleet as a whole is paused or has no servable weights: samples wait then.
    """

    def __init__(
        self,
        members: Members,
        router: Router,
        most_waiting: int,
        most_samples: int | None,
        held: Callable[[], bool],
    ) -> None:
        self.members = members
        self.router = router
        self._most_waiting = most_waiting
        self._most_samples = most_samples
        self._held = held
        self._queue: list[tuple[int, int, Ticket, asyncio.Future[None]]] = []
        """Most urgent first, then in order of arrival; those whose future is done wait no longer."""
        self._waiting = 0
        self._numbers = itertools.count()
        self._scheduled = False
        self._left = asyncio.Event()
        """Set when a sample has left its member."""
        self._hashed: tuple[list[int] | None, str | None, Blocks] = (None, None, NO_BLOCKS)
        """The prompt that was hashed last, its adapter, and its blocks."""
        self._tickets: dict[str, Ticket] = {}

    # Tickets -----------------------------------------------------------------------------------------------------

    def open(self, request: GenerateRequest, session: str | None) -> Ticket:
        """Make a sample's ticket, by which later calls find the sample."""
        ticket = Ticket(request, Work(self._blocks(request), session))
        self._tickets[request.request_id] = ticket
        return ticket

    def _blocks(self, request: GenerateRequest) -> Blocks:
        """Return the blocks of a prompt; the samples of one prompt share its list, which is hashed once."""
        if not self.router.policy.prefix_affinity:
            return NO_BLOCKS
        ids, adapter, blocks = self._hashed
        if ids is not request.prompt_token_ids or adapter != request.lora:
            blocks = Blocks.of(request.prompt_token_ids, request.lora)
            self._hashed = request.prompt_token_ids, request.lora, blocks
        return blocks

    def close(self, ticket: Ticket) -> None:
        """Forget a sample that has ended."""
        self._tickets.pop(ticket.request.request_id, None)

    def find(self, request_id: str) -> Ticket | None:
        """Return the sample of this id, if it is under way."""
        return self._tickets.get(request_id)

    def of(self, member: Member) -> list[Ticket]:
        """Return the samples that a member has."""
        return [ticket for ticket in self._tickets.values() if ticket.member is member]

    @property
    def waiting(self) -> int:
        """Number of samples that wait."""
        return self._waiting

    # Admission ---------------------------------------------------------------------------------------------------

    async def enter(self, ticket: Ticket) -> Member | None:
        """Wait for a member that may have the sample, and return it; None if the sample was aborted meanwhile.

        Raises:
            EngineBusy: The queue is full.
            WeightVersionGone: No member serves the version that the sample is pinned to.
            EngineDied: Every member has failed.
            EngineStateError: No member will serve without another push.
            DrivetrainError: Every member that serves has been lost with it: the last error.
        """
        if ticket.aborted:
            return None
        self._drop_ended()
        if not self._queue and (member := self._choose(ticket)) is not None:
            self._give(ticket, member)
            return member
        self._refuse_hopeless(ticket)
        if self._waiting >= self._most_waiting:
            raise EngineBusy(
                f"request {ticket.request.request_id}: {self._waiting} samples wait for an engine of the fleet, and "
                f"max_waiting={self._most_waiting}; send fewer at once, or raise max_waiting"
            )
        ticket.waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-ticket.request.priority, next(self._numbers), ticket, ticket.waiter))
        self._waiting += 1
        try:
            await ticket.waiter
        except BaseException:
            self.leave(ticket)  # the ticket may have got a member at the same time
            raise
        finally:
            self._waiting -= 1
            ticket.waiter = None
        return ticket.member

    def progress(self, ticket: Ticket, tokens: int) -> None:
        """Count tokens that a sample has got."""
        ticket.made += tokens
        taken = min(tokens, ticket.left)
        ticket.left -= taken
        if ticket.member is not None:
            ticket.member.load.tokens -= taken

    def leave(self, ticket: Ticket) -> None:
        """Take a sample from its member."""
        member, ticket.member = ticket.member, None
        if member is not None:
            member.load.samples -= 1
            member.load.tokens -= ticket.left
            ticket.left = 0
            self._left.set()
            self.changed()

    async def drained(self, member: Member) -> None:
        """Wait until a member has no sample, or has failed."""
        while member.load.samples and not member.status.failed:
            self._left.clear()
            await self._left.wait()

    def abort_waiting(self, ticket: Ticket) -> None:
        """End a sample that waits."""
        if ticket.waiter is not None and not ticket.waiter.done():
            ticket.waiter.set_result(None)

    # The queue ---------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Look through the queue soon: a member has room, or takes requests again."""
        if self._queue and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._hand_out)

    def _hand_out(self) -> None:
        self._scheduled = False
        for _ in range(SAMPLES_AT_ONCE):
            self._drop_ended()
            if not self._queue:
                return
            _, _, ticket, waiter = self._queue[0]
            if (member := self._choose(ticket)) is not None:
                self._give(ticket, member)
                waiter.set_result(None)
                continue
            try:
                self._refuse_hopeless(ticket)
            except DrivetrainError as error:
                waiter.set_exception(error)
            else:
                return
        self.changed()

    def _drop_ended(self) -> None:
        """Take samples off the queue that wait no longer."""
        while self._queue and self._queue[0][3].done():
            heapq.heappop(self._queue)

    def _choose(self, ticket: Ticket) -> Member | None:
        most = self._most_samples
        loads = {
            member.name: member.load
            for member in self.members
            if member.status.takes_requests
            and ticket.request.weight_version in (None, member.status.version)
            and (member.counts_resumed_tokens or not ticket.request.resumed_tokens)
            and member not in ticket.lost_by
            and (most is None or member.load.samples < most)
        }
        name = self.router.choose(ticket.work, loads)
        return None if name is None else self.members.find(name)

    def _give(self, ticket: Ticket, member: Member) -> None:
        ticket.member, ticket.evicted = member, ""
        ticket.left = len(ticket.request.prompt_token_ids) + ticket.request.max_new_tokens
        member.load.samples += 1
        member.load.taken += 1
        member.load.tokens += ticket.left
        self.router.sent(ticket.work, member.name)

    def require_version(self, request: GenerateRequest) -> None:
        """Raise :class:`WeightVersionGone` if the request is pinned to a version that no member serves."""
        pinned = request.weight_version
        servable = self.members.servable
        if pinned is None or not servable or any(member.status.version == pinned for member in servable):
            return
        served = ", ".join(f"{member.name} serves {member.status.version!r}" for member in servable)
        raise WeightVersionGone(
            f"weight_version={pinned!r} is not served by an engine of the fleet; {served}. Send the request again for "
            "one of these versions, or for any"
        )

    def _refuse_hopeless(self, ticket: Ticket) -> None:
        """Raise if waiting is pointless."""
        if self._held():
            return
        self.require_version(ticket.request)
        soon = [member for member in self.members if member.status.may_serve_soon]
        if not soon:
            require_some(self.members)
            raise no_member(f"request {ticket.request.request_id}", self.members)
        ready = [member for member in soon if member.status.health is Health.READY]
        if ready and all(member in ticket.lost_by for member in ready):
            raise ticket.lost_by[ready[-1]]
