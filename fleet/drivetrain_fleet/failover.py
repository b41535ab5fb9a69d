"""One sample on its way through a fleet: to a member, to another one if that is lost, and to its result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from contextvars import ContextVar

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.engine.completions import check_pinned
from drivetrain.errors import (
    ConnectionLost,
    DrivetrainError,
    EngineDied,
    EngineStateError,
    MemberLost,
    WeightVersionGone,
    WireError,
)
from drivetrain.types.outputs import FinishReason
from drivetrain_fleet.members import Member, named, on_each, require_some
from drivetrain_fleet.resuming import SoFar, not_resumable
from drivetrain_fleet.sending import Sending, Ticket

logger = logging.getLogger("drivetrain.fleet")

SESSION: ContextVar[str | None] = ContextVar("drivetrain_fleet_session", default=None)
"""The session that the samples of this context belong to."""
_REFUSED_AT_THE_GATE = ("asleep", "dirty")
"""States of an engine that refuses a sample before it begins."""


class Evicted(DrivetrainError):
    """A member must not continue a sample. Raised and caught within the fleet."""


class VersionUnknown(Evicted):
    """A member has generated with weights that are not the fleet's."""


class Failover:
    """Runs samples on members.

    A sample that has no token yet goes to another member when its own is lost. One that has tokens fails: to repeat it
    would show its reader two beginnings, and favour short completions among those that a trainer gets. With ``resume``
    it goes on from its tokens at another member, if that member can honour each of its fields from there.

    Args:
        sending: Gives samples to members.
        exact: True: tokens are streamed from members, so it is known which samples have none. False: a sample that a
            member had counts as begun.
        resume: True: samples go on from their tokens where they can.
        known_version: Returns True for a weight version that the fleet has committed.
    """

    def __init__(self, sending: Sending, exact: bool, resume: bool, known_version: Callable[[str], bool]) -> None:
        self.sending = sending
        self.exact = exact
        self.resume = resume
        self._known_version = known_version
        self._aborting: set[asyncio.Task[None]] = set()

    async def steps(self, request: GenerateRequest, *, exact: bool = True) -> AsyncGenerator[TokenDelta, None]:
        """Yield the steps of one sample; without ``exact`` only one, with the whole result."""
        sending = self.sending
        ticket = sending.open(request, SESSION.get())
        so_far = SoFar(request) if self.resume and exact and not not_resumable(request, counted=True) else None
        if so_far is not None:
            ticket.request = so_far.request
        try:
            while True:
                if so_far is not None and (result := so_far.ended()) is not None:
                    yield TokenDelta([], result=result)
                    return
                member = await sending.enter(ticket)
                if member is None:
                    result = _aborted(request)
                    yield TokenDelta([], result=result if so_far is None else so_far.joined(result))
                    return
                version = member.status.version
                try:
                    async with aclosing(
                        member.calls.stream(ticket.request) if exact else _whole(member, ticket)
                    ) as deltas:
                        async for delta in deltas:
                            if so_far is not None:
                                delta = so_far.joined_delta(delta)
                            self._check(ticket, member, delta.result)
                            sending.progress(ticket, len(delta.token_ids))
                            if so_far is not None:
                                so_far.add(delta)
                            yield delta
                    return
                except (ConnectionLost, EngineDied, EngineStateError, WireError, Evicted, WeightVersionGone) as error:
                    self._require_another(ticket, member, error, so_far, version)
                finally:
                    sending.leave(ticket)
        finally:
            sending.close(ticket)

    def _check(self, ticket: Ticket, member: Member, result: GenerateResult | None) -> None:
        """Raise unless a step may be handed out; ``result`` is the last one's."""
        if result is not None:
            ticket.made = max(ticket.made, len(result.token_ids))
        if ticket.evicted and not ticket.aborted:
            raise Evicted(ticket.evicted)
        pinned = ticket.request.weight_version
        if pinned is not None and member.status.version != pinned and (result is None or not result.weight_versions):
            raise WeightVersionGone(
                f"request {ticket.request.request_id}: an update of {member.name} replaced weight_version={pinned!r} "
                f"by {member.status.version!r} before its end. Send it again for a version that is served"
            )
        if result is None:
            return
        check_pinned(ticket.request, result)
        for span in result.weight_versions:
            if not self._known_version(span.version):
                why = f"it generated with the version {span.version!r}, which the fleet has not committed"
                member.left_behind(why)
                raise VersionUnknown(why)
        self.sending.router.answered(ticket.work, result.token_ids, member.name)

    def _require_another(
        self, ticket: Ticket, member: Member, error: DrivetrainError, so_far: SoFar | None, version: str
    ) -> None:
        """Let the sample go to another member, or raise; ``version`` is the one that its member served at first."""
        if isinstance(error, EngineDied):
            member.fail(str(error))
            require_some(self.sending.members)
        if isinstance(error, EngineStateError) and error.state in _REFUSED_AT_THE_GATE:
            ticket.made = 0 if so_far is None else len(so_far)
        if isinstance(error, WeightVersionGone):
            self._require_first_token(ticket, member, error)
            return
        if ticket.made and (why := self._cannot_resume(ticket, member, error, so_far, version)):
            what = "may have begun" if not self.exact else f"had {ticket.made} tokens"
            raise MemberLost(
                f"request {ticket.request.request_id} {what} when {member.name} was lost: {error}. {why}The fleet's "
                "other engines serve on; send the request again if a repetition is right",
                member=member.name,
            ) from error
        if not isinstance(error, Evicted):  # its member may serve again, once it is synced
            ticket.lost_by[member] = MemberLost(
                f"request {ticket.request.request_id} was lost with {member.name}: {error}", member=member.name
            )
        logger.info("request %s goes from %s to another engine: %s", ticket.request.request_id, member.name, error)

    @staticmethod
    def _require_first_token(ticket: Ticket, member: Member, error: WeightVersionGone) -> None:
        """Let a pinned sample go to another member of its version, or raise: its own no longer serves that version."""
        if ticket.made:
            raise error
        ticket.lost_by[member] = error

    def _cannot_resume(
        self, ticket: Ticket, member: Member, error: DrivetrainError, so_far: SoFar | None, version: str
    ) -> str:
        """Let the sample go on from its tokens; return why that is impossible, or ""."""
        if not self.resume:
            return "resume=True lets such requests go on from their tokens. "
        counted = all(one.counts_resumed_tokens for one in self.sending.members if not one.status.failed)
        if fields := ", ".join(not_resumable(ticket.request, counted=counted)):
            return f"It cannot go on from its tokens because of {fields}. "
        if so_far is None:
            return "It cannot go on from its tokens because of exact_failover=False. "
        if isinstance(error, VersionUnknown) or member.status.version != version:
            return f"It cannot go on from its tokens: not all are known to be of the version {version!r}. "
        if member.engine.get_weight_version() != version:
            return f"It cannot go on from its tokens: {member.name} has changed its weights from {version!r}. "
        if why := so_far.resume(version, counted=counted):
            return f"It cannot go on from its tokens: {why}. "
        ticket.request, ticket.made = so_far.request, len(so_far)
        return ""

    # Ending early ------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ask for an early end of these samples, wherever they are."""
        at: dict[Member, list[str]] = {}
        for request_id in request_ids:
            ticket = self.sending.find(request_id)
            if ticket is None:
                continue
            ticket.aborted = True
            if ticket.member is not None:
                at.setdefault(ticket.member, []).append(request_id)
            else:
                self.sending.abort_waiting(ticket)
        outcomes = await on_each(at, lambda member: member.calls.abort_samples(at[member]))
        if outcomes.refused:
            raise named(outcomes.refused, "abort()")

    def evict(self, member: Member, why: str) -> None:
        """End the samples that a member must not continue; samples without a token go to another member."""
        tickets = self.sending.of(member)
        for ticket in tickets:
            ticket.evicted = why
        if tickets and not member.status.failed:
            task = asyncio.ensure_future(self._abort_evicted(member, [one.request.request_id for one in tickets]))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _abort_evicted(self, member: Member, request_ids: list[str]) -> None:
        try:
            await member.calls.abort_samples(request_ids)
        except DrivetrainError as error:
            logger.warning("%d samples could not be taken from %s: %s", len(request_ids), member.name, error)


async def _whole(member: Member, ticket: Ticket) -> AsyncGenerator[TokenDelta, None]:
    ticket.made = 1  # that is not known, so it counts as begun
    result = await member.calls.generate(ticket.request)
    ticket.made = 0
    yield TokenDelta([], result=result)


def _aborted(request: GenerateRequest) -> GenerateResult:
    wanted = request.params.logprobs
    return GenerateResult(
        token_ids=[],
        finish_reason=FinishReason.ABORT,
        weight_versions=[],
        logprobs=[] if wanted is not None else None,
        top_logprobs=[] if wanted else None,
    )
