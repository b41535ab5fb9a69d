"""What an engine must do with its requests, pauses, sleeps and updates, as a model in plain Python.

It is written from the contracts of the design and shares no code with the engine, so that the two can disagree:
a random history is played on both, and each answer of the engine is compared with the ruling here.

    paused    requests that arrive wait; what became of those in flight was decided by the mode
    asleep    nothing runs; requests that arrive are refused, unless a pause had said that they wait
    dirty     no complete weights: requests are refused, and only a complete update leads out
    updating  weights change; requests that arrive wait, other changes of state are refused

A :class:`Contract` is a value: each action returns a :class:`Ruling`, which says whether the engine must refuse
and what holds after it accepted. What a running request does is not known: it may end by itself at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from drivetrain.errors import DrivetrainError, EngineBusy, EngineStateError, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode


class Fate(Enum):
    """What becomes of a request."""

    WAITING = "waiting"
    """It was admitted and has not begun; no token is made until the engine is free."""
    RUNNING = "running"
    """It makes tokens, and may end by itself at any moment."""
    FROZEN = "frozen"
    """It makes no token and does not end, until the engine is free or it is aborted."""
    DONE = "done"
    """It came to its own end, or has come to it when the action returns."""
    ABORTED = "aborted"
    """It comes back marked aborted, with the tokens it had."""


class InFlight(Enum):
    """What ``sleep`` is told to do with requests in flight."""

    LEAVE = "leave"
    """Nothing: it is refused if there are any."""
    ABORT = "abort"
    """``abort_first=True``."""
    DRAIN = "drain"
    """``drain_timeout``: they end by themselves."""


class Weights(Enum):
    """Whether the weights may be served."""

    CLEAN = "clean"
    UPDATING = "updating"
    DIRTY = "dirty"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the contract sees it."""

    fate: Fate
    versions: tuple[str, ...] = ()
    """Weight versions under which it ran, in order: its spans are some of them, in this order."""
    stale: frozenset[str] = frozenset()
    """Those under which it ran on a cache that older weights had made: its tokens are neither version's own."""
    holds_cache: bool = False
    cache_is_older: bool = False
    """Its cache was made by older weights, at least in part."""
    raced: bool = False
    """Aborted while it ran: it may have come to its own end first."""

    @property
    def under_way(self) -> bool:
        """It has not ended."""
        return self.fate in (Fate.WAITING, Fate.RUNNING, Fate.FROZEN)

    @property
    def in_flight(self) -> bool:
        """The engine works on it, or has frozen it."""
        return self.fate in (Fate.RUNNING, Fate.FROZEN)


@dataclass(frozen=True, slots=True)
class Refusal:
    """How the engine must refuse."""

    error: type[DrivetrainError]
    state: str | None = None
    """The state that an EngineStateError names."""
    unless_ended: bool = False
    """It must accept instead if the requests that run have ended by themselves meanwhile."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the contract says of one action."""

    after: Contract
    """What holds once the engine has accepted; a refusal changes nothing."""
    refusal: Refusal | None = None
    """None: it must accept."""


@dataclass(frozen=True)
class Contract:
    """All that the contract knows of one engine at one moment."""

    version: str
    """Of the weights that were last committed."""
    capabilities: frozenset[Capability] = frozenset(Capability)
    keeps_weights: bool = False
    """Weights come back from sleep as they were."""
    paused: PauseMode | None = None
    asleep: frozenset[MemoryTag] = frozenset()
    weights: Weights = Weights.CLEAN
    requests: Mapping[str, Request] = field(default_factory=dict)

    # What can be seen from outside -------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The name that the engine gives its state."""
        if self.weights is Weights.UPDATING:
            return "updating"
        if self.asleep:
            return "asleep"
        if self.weights is Weights.DIRTY:
            return "dirty"
        return "paused" if self.paused else "ready"

    @property
    def is_paused(self) -> bool:
        """Whether the engine calls itself paused: by a pause, or by weights that may not be served."""
        return self.paused is not None or self.weights is not Weights.CLEAN

    def under_way(self) -> list[str]:
        """Requests that have not ended, oldest first."""
        return [name for name, request in self.requests.items() if request.under_way]

    def in_flight(self) -> list[str]:
        """Requests that the engine works on or has frozen."""
        return [name for name, request in self.requests.items() if request.in_flight]

    def having(self, fate: Fate) -> list[str]:
        """Requests with this fate."""
        return [name for name, request in self.requests.items() if request.fate is fate]

    # Requests ----------------------------------------------------------------------------------------------------

    def generate(self, name: str) -> Ruling:
        """A request arrives. A pause says that arrivals wait, so they wait through a sleep within it."""
        if self.asleep:
            refused = self.paused is None
        else:
            refused = self.weights is Weights.DIRTY
        if refused:
            return self._refused()
        waiting = replace(self, requests={**self.requests, name: Request(Fate.WAITING)})
        return Ruling(waiting._set_free())

    def ended_by_itself(self, name: str) -> Self:
        """A request was seen to have come to its own end: it runs, or did so until it was frozen just now."""
        return self._change(self.requests[name].fate, lambda request: replace(request, fate=Fate.DONE), only=name)

    def abort(self, name: str | None) -> Ruling:
        """One request or all of them are aborted, wherever they are; one that has ended is passed over."""
        return Ruling(self._aborted([n for n in self.under_way() if name in (None, n)]))

    # Pause -------------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> Ruling:
        """The pause table. Requests that wait go on waiting in every mode."""
        if self.weights is Weights.UPDATING:
            return self._refused()
        if mode is PauseMode.WAIT and self.having(Fate.FROZEN):
            return self._refused()
        # A cache that was released stays so: in_place after retract is retract.
        kept = self.paused is PauseMode.RETRACT and mode is PauseMode.IN_PLACE
        return Ruling(replace(self._quiesced(mode), paused=self.paused if kept else mode))

    def continue_generation(self) -> Ruling:
        """What waits or is frozen goes on, unless the engine sleeps."""
        if self.weights is not Weights.CLEAN:
            return self._refused()
        return Ruling(replace(self, paused=None)._set_free())

    # Sleep -------------------------------------------------------------------------------------------------------

    def sleep(self, tags: frozenset[MemoryTag], in_flight: InFlight) -> Ruling:
        """Memory is given back. Requests retracted by a pause hold none of it."""
        if self.weights is Weights.UPDATING:
            return self._refused()
        after, refusal = self, None
        if self.in_flight() and self.paused is not PauseMode.RETRACT:
            frozen = bool(self.having(Fate.FROZEN))
            match in_flight:
                case InFlight.ABORT:
                    after = self._aborted(self.in_flight())
                case InFlight.DRAIN:
                    after, refusal = self._drained(), Refusal(EngineBusy) if frozen else None
                case InFlight.LEAVE:
                    after, refusal = self._drained(), Refusal(EngineBusy, unless_ended=not frozen)
        loses = MemoryTag.WEIGHTS in tags - self.asleep and not self.keeps_weights
        weights = Weights.DIRTY if loses else self.weights
        return Ruling(replace(after, asleep=self.asleep | tags, weights=weights), refusal)

    def wake_up(self, tags: frozenset[MemoryTag]) -> Ruling:
        """Memory is taken again; with the last of it the engine is free, if nothing else holds it."""
        if self.weights is Weights.UPDATING:
            return self._refused()
        return Ruling(replace(self, asleep=self.asleep - tags)._set_free())

    # Weights -----------------------------------------------------------------------------------------------------

    def begin_update(self, mode: PauseMode) -> Ruling:
        """Weights begin to change; ``mode`` is what becomes of requests in flight, as in a pause."""
        if self.weights is Weights.UPDATING or MemoryTag.WEIGHTS in self.asleep:
            return self._refused()
        frozen = bool(self.having(Fate.FROZEN))
        after = replace(self._quiesced(mode), weights=Weights.UPDATING)
        if self.in_flight() and Capability.WEIGHT_UPDATE_IN_FLIGHT not in self.capabilities:
            drained = replace(self._drained(), weights=Weights.UPDATING)
            return Ruling(drained, Refusal(UnsupportedCapability, unless_ended=not frozen))
        if mode is PauseMode.WAIT and frozen:
            return self._refused()
        return Ruling(after)

    def commit_update(self, version: str) -> Self:
        """The update ends well: the version is published, and the engine is as free as it was before."""
        aged = self._change(
            Fate.FROZEN, lambda request: replace(request, cache_is_older=request.holds_cache and bool(request.versions))
        )
        return replace(aged, version=version, weights=Weights.CLEAN)._set_free()

    def break_update(self) -> Self:
        """The update breaks: nothing is served until a complete one is committed."""
        return replace(self, weights=Weights.DIRTY)

    # ---------------------------------------------------------------------------------------------------------------

    def _refused(self) -> Ruling:
        return Ruling(self, Refusal(EngineStateError, self.state))

    def _set_free(self) -> Self:
        """If nothing holds requests any more, those that wait or are frozen run, under the version there is."""
        if self.paused or self.asleep or self.weights is not Weights.CLEAN:
            return self

        def run(request: Request) -> Request:
            versions = request.versions
            if versions[-1:] != (self.version,):
                versions += (self.version,)
            stale = request.stale | {self.version} if request.cache_is_older else request.stale
            return replace(request, fate=Fate.RUNNING, versions=versions, stale=stale, holds_cache=True)

        return self._change(Fate.WAITING, run)._change(Fate.FROZEN, run)

    def _quiesced(self, mode: PauseMode) -> Self:
        match mode:
            case PauseMode.ABORT:
                return self._aborted(self.in_flight())
            case PauseMode.WAIT:
                return self._drained()
            case PauseMode.IN_PLACE:
                return self._change(Fate.RUNNING, lambda request: replace(request, fate=Fate.FROZEN))
            case PauseMode.RETRACT:
                frozen = self._change(Fate.RUNNING, lambda request: replace(request, fate=Fate.FROZEN))
                return frozen._change(
                    Fate.FROZEN, lambda request: replace(request, holds_cache=False, cache_is_older=False)
                )

    def _drained(self) -> Self:
        return self._change(Fate.RUNNING, lambda request: replace(request, fate=Fate.DONE))

    def _aborted(self, names: list[str]) -> Self:
        def abort(request: Request) -> Request:
            return replace(request, fate=Fate.ABORTED, raced=request.fate is Fate.RUNNING)

        changed = {name: abort(request) if name in names else request for name, request in self.requests.items()}
        return replace(self, requests=changed)

    def _change(self, fate: Fate, change: Callable[[Request], Request], only: str | None = None) -> Self:
        changed = {
            name: change(request) if request.fate is fate and only in (None, name) else request
            for name, request in self.requests.items()
        }
        return replace(self, requests=changed)
