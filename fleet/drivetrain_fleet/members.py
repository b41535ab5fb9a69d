"""The engines of a fleet: each as a holder calls it, with its health and its load."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.holder_calls import Claims, HolderCalls
from drivetrain.engine.states import EngineState, WeightState
from drivetrain.errors import (
    DrivetrainError,
    EngineDied,
    EngineInternalError,
    EngineStateError,
    MemberLost,
    from_wire,
    to_wire,
)
from drivetrain.process.shared_engine import SharedEngine
from drivetrain_fleet.health import EXPLAINED, Health, MemberStatus
from drivetrain_fleet.routing import Load

logger = logging.getLogger("drivetrain.fleet")

_T = TypeVar("_T")
_numbers: Final = itertools.count()

PATIENCE: Final = 0.95
"""Share of a timeout of the fleet's that each engine has, so that the error names the engine that did not answer."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One engine of a fleet, as ``InferenceEngineClient.members`` shows it."""

    name: str
    health: Health
    why: str
    """The reason for which it is stale, lagging or failed, or the memory that sleeps; empty otherwise."""
    version: str
    """The weight version that it serves."""
    samples: int
    """Samples of the fleet that it has."""
    tokens: int
    """Tokens of their prompts, and tokens that are still to be generated."""


class Member:
    """One engine of a fleet.

    Args:
        name: Its name in the fleet, for messages.
        engine: The engine: of this process, attached by handle, or a fleet.
        changed: Called after each change of the status.
    """

    def __init__(self, name: str, engine: InferenceEngine, changed: Callable[[Member], None]) -> None:
        self.name = name
        self.number = next(_numbers)
        """Tells it from an earlier member of its name."""
        self.engine = engine
        self.calls: SharedEngine = HolderCalls("the fleet", engine.parts, Claims())
        self.status = MemberStatus()
        self.load = Load()
        self.held = False
        """True while this member is paused by the fleet."""
        self.foreign_adapters: set[str] = set()
        """Names of adapters that another holder has loaded and used when the fleet wanted to unload them."""
        self._changed = changed
        self._watching = False
        self._ours = 0
        """Number of changes that the fleet itself is making to it."""

    def __repr__(self) -> str:
        return f"<Member {self.name}: {self.status.describe()}>"

    @property
    def counts_resumed_tokens(self) -> bool:
        """True if it honours ``GenerateRequest.resumed_tokens``."""
        return self.engine.parts.backend.counts_resumed_tokens

    def move_to(self, status: MemberStatus) -> None:
        """Take the next status. A failed member ignores it."""
        if self.status.failed or status == self.status:
            return
        self.status = status
        self._changed(self)

    def fail(self, why: str) -> None:
        """Any → FAILED."""
        if not self.status.failed:
            logger.error("%s failed: %s", self.name, why)
        self.move_to(self.status.fail(why))

    def left_behind(self, why: str) -> None:
        """Any but FAILED → STALE."""
        if self.status.failed:
            return
        if self.status.servable or self.status.updating:
            logger.warning("%s is stale: %s", self.name, why)
        self.move_to(self.status.stale(why))

    def missed(self, why: str, most: int) -> bool:
        """Record a missed update of the fleet; return True if the member serves on, LAGGING, and False if it is STALE.

        Args:
            why: The reason, for messages.
            most: Versions that it may be behind. If the update may have touched its weights, it is stale.
        """
        engine, status = self.engine, self.status
        served = (engine.get_weight_version(), engine.parts.weights.update_id)
        intact = engine.status.weights is WeightState.CLEAN and served == (status.version, status.update_id)
        if status.servable and not status.updating and status.behind < most and intact:
            logger.warning("%s is %d versions behind and serves on: %s", self.name, status.behind + 1, why)
            self.move_to(status.lag(why))
            return True
        self.left_behind(why)
        return False

    # The engine's own state --------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Follow the engine's state from now on."""
        if not self._watching:
            self._watching = True
            self.engine.parts.controller.subscribe(self._look)
        self._look()

    def unwatch(self) -> None:
        """Follow it no longer."""
        if self._watching:
            self._watching = False
            self.engine.parts.controller.unsubscribe(self._look)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let the fleet change version or weights within: such changes are not another holder's."""
        self._ours += 1
        try:
            yield
        finally:
            self._ours -= 1
            self._look()

    def _look(self) -> None:
        """Derive the member's status from the engine's state."""
        engine = self.engine.status
        if engine.state in (EngineState.FAILED, EngineState.CLOSED):
            self.fail(engine.describe())
            return
        if not self.status.started or self.status.failed:
            return
        held = engine.paused is not None or bool(engine.asleep)
        self.move_to(self.status.pause() if held else self.status.resume())
        if self._ours or self.status.updating or not self.status.servable:
            return
        version = self.engine.get_weight_version()
        if engine.weights is WeightState.DIRTY:
            self.left_behind(f"its weights are dirty: {engine.why}")
        elif engine.weights is WeightState.UPDATING:
            self.left_behind("another holder updates its weights")
        elif version != self.status.version:
            self.left_behind(
                f"another holder gave its weights the version {version!r}; the fleet's is {self.status.version!r}"
            )
        elif self.engine.parts.weights.update_id != self.status.update_id:
            self.left_behind(f"another holder has pushed other weights as {version!r}")

    def report(self) -> MemberReport:
        """Describe it."""
        status = self.status
        why = status.why if status.health in EXPLAINED else ""
        if status.health is Health.PAUSED and self.engine.status.asleep:
            why = self.engine.status.describe()
        return MemberReport(
            self.name, status.health, why, self.engine.get_weight_version(), self.load.samples, self.load.tokens
        )


class Members:
    """The engines of one fleet, in the order in which they joined."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def put(self, member: Member) -> None:
        """Let a member join."""
        self._by_name[member.name] = member

    def pop(self, name: str) -> Member:
        """Let a member leave."""
        return self._by_name.pop(name)

    def find(self, name: str) -> Member | None:
        """Return the member of this name; None if there is none."""
        return self._by_name.get(name)

    @property
    def serving(self) -> list[Member]:
        """Members that have not failed and have started."""
        return [member for member in self if member.status.takes_updates]

    @property
    def synced(self) -> list[Member]:
        """Members in :attr:`serving` whose weights are the fleet's."""
        return [member for member in self.serving if member.status.synced]

    @property
    def servable(self) -> list[Member]:
        """Members in :attr:`serving` that may have requests: the synced ones, and the lagging ones."""
        return [member for member in self.serving if member.status.servable]

    def least_loaded(self, action: str) -> Member:
        """Return the member with the fewest tokens among those that serve, for a call that any of them can answer.

        Raises:
            EngineDied: Every engine has failed.
            EngineStateError: No member has the fleet's weights.
        """
        members = [member for member in self.synced if not member.status.paused] or self.synced
        if not members:
            require_some(self)
            raise no_member(action, self)
        return min(members, key=lambda one: (one.load.tokens, one.load.taken))


def no_member(action: str, members: Iterable[Member]) -> EngineStateError:
    """Make the error for a call that no engine of the fleet may serve."""
    return EngineStateError(
        f"{action} is refused: no engine of the fleet may serve; {described(members)}. Push a complete weight update, "
        "or add an engine",
        state="stale",
    )


def described(members: Iterable[Member]) -> str:
    """Name members with their health."""
    return "; ".join(f"{member.name} is {member.status.describe()}" for member in members)


# Calls of many members -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcomes(Generic[_T]):
    """Results and errors of one call of several members, by member."""

    done: dict[Member, _T] = field(default_factory=dict)
    failed: dict[Member, DrivetrainError] = field(default_factory=dict)

    @property
    def refused(self) -> dict[Member, DrivetrainError]:
        """Members that failed the call and live."""
        return {member: error for member, error in self.failed.items() if not member.status.failed}


async def on_each(
    members: Iterable[Member], call: Callable[[Member], Awaitable[_T]], seconds: float | None = None
) -> Outcomes[_T]:
    """Call all members at once and wait for all, each for at most ``seconds``; a member that died is failed.

    Outcomes are in the order of ``members``.
    """
    members = list(members)
    outcomes: Outcomes[_T] = Outcomes()

    async def one(member: Member) -> None:
        try:
            async with deadline(seconds, f"{member.name} to answer"):
                outcomes.done[member] = await call(member)
        except EngineDied as error:
            member.fail(str(error))
            outcomes.failed[member] = error
        except DrivetrainError as error:
            outcomes.failed[member] = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcomes.failed[member] = EngineInternalError("its call was cancelled")
        except Exception as error:
            outcomes.failed[member] = EngineInternalError(f"{type(error).__name__}: {error}")

    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(one(member))
    return Outcomes(
        {member: outcomes.done[member] for member in members if member in outcomes.done},
        {member: outcomes.failed[member] for member in members if member in outcomes.failed},
    )


def named(
    failed: dict[Member, DrivetrainError], action: str, after: str = "", *, failing: bool = False
) -> DrivetrainError:
    """Make one error of the errors of several members: of the first one's class, naming all.

    Args:
        failed: The errors.
        action: The call that failed.
        after: The state of the fleet now, and a remedy.
        failing: True if an internal error fails the engine that raised it: it is then ``MemberLost``.
    """
    first = next(iter(failed.values()))
    said = "; ".join(f"{member.name}: {type(error).__name__}: {error}" for member, error in failed.items())
    message = f"{action} failed on {len(failed)} of the fleet's engines: {said}" + (f". {after}" if after else "")
    if isinstance(first, EngineDied) or (failing and isinstance(first, EngineInternalError)):
        return MemberLost(message, member=next(iter(failed)).name)
    kind, _, fields = to_wire(first)
    error = from_wire(kind, message, fields)
    error.__cause__ = first
    return error


def require_some(members: Members) -> None:
    """Raise :class:`EngineDied` if every engine has failed."""
    if all(member.status.failed for member in members):
        raise EngineDied(f"every engine of the fleet has failed: {described(members)}")
