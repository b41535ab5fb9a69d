"""A model of the contract in plain Python: the required treatment of requests, pauses, sleeps and updates.

It follows the contracts of the design and shares no code with the engine, so that the two can disagree: a random
history is played on both, and each answer of the engine is compared with the ruling here.

    paused    arriving requests wait; the mode decided what happens to those in flight
    asleep    nothing runs; arriving requests are refused, unless the engine was paused first: then they wait
    dirty     no complete weights: requests are refused, and only a complete update leads out
    updating  weights change; arriving requests wait, and other changes of state are refused

A :class:`Contract` is a value: each action returns a :class:`Ruling`, which says if the engine must refuse, and the
contract after it accepted. The progress of a running request is unknown: it may end by itself at any moment.
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
    """The condition of a request."""

    WAITING = "waiting"
    """Admitted but not begun; it makes no token until the engine is free."""
    RUNNING = "running"
    """Makes tokens, and may end by itself at any moment."""
    FROZEN = "frozen"
    """Makes no token and does not end until the engine is free or it is aborted."""
    DONE = "done"
    """Ended by itself, at the latest when the action returns."""
    ABORTED = "aborted"
    """Comes back marked aborted, with its tokens so far."""


class InFlight(Enum):
    """Treatment of requests in flight by ``sleep``."""

    LEAVE = "leave"
    """No argument: sleep is refused if there are any."""
    ABORT = "abort"
    """``abort_first=True``."""
    DRAIN = "drain"
    """``drain_timeout``: they end by themselves."""


class Weights(Enum):
    """The condition of the weights; only clean ones may be served."""

    CLEAN = "clean"
    UPDATING = "updating"
    DIRTY = "dirty"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the contract sees it."""

    fate: Fate
    versions: tuple[str, ...] = ()
    """Weight versions under which it ran, in order; its spans are a subsequence of them."""
    stale: frozenset[str] = frozenset()
    """Versions under which it ran on a cache of older weights: its tokens there are not those of any one version."""
    holds_cache: bool = False
    cache_is_older: bool = False
    """At least part of its cache was made by older weights."""
    raced: bool = False
    """Aborted while it ran, so it may have ended by itself first."""

    @property
    def under_way(self) -> bool:
        """True until the request has ended."""
        return self.fate in (Fate.WAITING, Fate.RUNNING, Fate.FROZEN)

    @property
    def in_flight(self) -> bool:
        """True while the engine works on the request or has frozen it."""
        return self.fate in (Fate.RUNNING, Fate.FROZEN)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal that the engine must give."""

    error: type[DrivetrainError]
    state: str | None = None
    """The state that an EngineStateError names."""
    unless_ended: bool = False
    """The engine must accept instead if all running requests have just ended by themselves."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The contract's answer to one action."""

    after: Contract
    """The contract once the engine has accepted; a refusal changes nothing."""
    refusal: Refusal | None = None
    """None: the engine must accept."""


@dataclass(frozen=True)
class Contract:
    """Everything that the contract knows of one engine at one moment."""

    version: str
    """Version of the weights committed last."""
    capabilities: frozenset[Capability] = frozenset(Capability)
    keeps_weights: bool = False
    """Weights survive sleep."""
    paused: PauseMode | None = None
    asleep: frozenset[MemoryTag] = frozenset()
    weights: Weights = Weights.CLEAN
    requests: Mapping[str, Request] = field(default_factory=dict)

    # Observable state --------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The engine's name for its state."""
        if self.weights is Weights.UPDATING:
            return "updating"
        if self.asleep:
            return "asleep"
        if self.weights is Weights.DIRTY:
            return "dirty"
        return "paused" if self.paused else "ready"

    @property
    def is_paused(self) -> bool:
        """True if the engine reports itself as paused: by a pause, or by weights that may not be served."""
        return self.paused is not None or self.weights is not Weights.CLEAN

    def under_way(self) -> list[str]:
        """Return the requests that have not ended, oldest first."""
        return [name for name, request in self.requests.items() if request.under_way]

    def in_flight(self) -> list[str]:
        """Return the requests that the engine works on or has frozen."""
        return [name for name, request in self.requests.items() if request.in_flight]

    def having(self, fate: Fate) -> list[str]:
        """Return the requests with this fate."""
        return [name for name, request in self.requests.items() if request.fate is fate]

    # Requests ----------------------------------------------------------------------------------------------------

    def generate(self, name: str) -> Ruling:
        """A request arrives. A pause makes it wait, even through a sleep within the pause."""
        if self.asleep:
            refused = self.paused is None
        else:
            refused = self.weights is Weights.DIRTY
        if refused:
            return self._refused()
        waiting = replace(self, requests={**self.requests, name: Request(Fate.WAITING)})
        return Ruling(waiting._set_free())

    def ended_by_itself(self, name: str) -> Self:
        """A request was seen to have ended by itself, while running or just before it was frozen."""
        return self._change(self.requests[name].fate, lambda request: replace(request, fate=Fate.DONE), only=name)

    def abort(self, name: str | None) -> Ruling:
        """One request is aborted, or all are, in any state; ended ones are skipped."""
        return Ruling(self._aborted([n for n in self.under_way() if name in (None, n)]))

    # Pause -------------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> Ruling:
        """Apply the pause table. Waiting requests keep waiting in every mode."""
        if self.weights is Weights.UPDATING:
            return self._refused()
        if mode is PauseMode.WAIT and self.having(Fate.FROZEN):
            return self._refused()
        # A released cache stays released: in_place after retract is still retract.
        kept = self.paused is PauseMode.RETRACT and mode is PauseMode.IN_PLACE
        return Ruling(replace(self._quiesced(mode), paused=self.paused if kept else mode))

    def continue_generation(self) -> Ruling:
        """Waiting and frozen requests run again, unless the engine sleeps."""
        if self.weights is not Weights.CLEAN:
            return self._refused()
        return Ruling(replace(self, paused=None)._set_free())

    # Sleep -------------------------------------------------------------------------------------------------------

    def sleep(self, tags: frozenset[MemoryTag], in_flight: InFlight) -> Ruling:
        """Memory is freed. Requests retracted by a pause hold none of it."""
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
        """Memory is taken again; with the last of it the engine is free, unless something else blocks it."""
        if self.weights is Weights.UPDATING:
            return self._refused()
        return Ruling(replace(self, asleep=self.asleep - tags)._set_free())

    # Weights -----------------------------------------------------------------------------------------------------

    def begin_update(self, mode: PauseMode) -> Ruling:
        """An update begins; ``mode`` decides what happens to requests in flight, as in a pause."""
        if self.weights is Weights.UPDATING or MemoryTag.WEIGHTS in self.asleep:
            return self._refused()
        frozen = bool(self.having(Fate.FROZEN))
        after = replace(self._quiesced(mode), weights=Weights.UPDATING)
        if self.in_flight() and not self._can_freeze_for_an_update(mode):
            drained = replace(self._drained(), weights=Weights.UPDATING)
            return Ruling(drained, Refusal(UnsupportedCapability, unless_ended=not frozen))
        if mode is PauseMode.WAIT and frozen:
            return self._refused()
        return Ruling(after)

    def _can_freeze_for_an_update(self, mode: PauseMode) -> bool:
        match mode:
            case PauseMode.IN_PLACE:
                return Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE in self.capabilities
            case PauseMode.RETRACT:
                return Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT in self.capabilities
            case _:
                return True  # no request is left when the weights change

    def commit_update(self, version: str) -> Self:
        """The update succeeds: its version is published, and the engine is as free as before."""
        aged = self._change(
            Fate.FROZEN, lambda request: replace(request, cache_is_older=request.holds_cache and bool(request.versions))
        )
        return replace(aged, version=version, weights=Weights.CLEAN)._set_free()

    def break_update(self) -> Self:
        """The update fails: nothing is served until a complete one is committed."""
        return replace(self, weights=Weights.DIRTY)

    # ---------------------------------------------------------------------------------------------------------------

    def _refused(self) -> Ruling:
        return Ruling(self, Refusal(EngineStateError, self.state))

    def _set_free(self) -> Self:
        """If nothing blocks requests any more, waiting and frozen ones run under the current version."""
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
