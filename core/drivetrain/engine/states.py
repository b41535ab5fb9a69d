"""The state machine of one engine: pure values, no I/O.

    STARTING → READY ⇄ PAUSED
               READY ⇄ ASLEEP(tags)
               READY | PAUSED | ASLEEP | DIRTY → UPDATING → (where it was) | DIRTY
               any → FAILED        any → CLOSED

An engine can be paused, asleep and without servable weights at once, so a status keeps the three apart, and ``state``
names the one that takes precedence. The only way from DIRTY to READY is a complete, committed update: an engine with
half-updated or lost weights would answer with plausible gibberish. Nothing leads from FAILED to READY: the condition of
a dead engine is unknown. Every call of an engine that died raises EngineDied with the reason, also after it was closed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from drivetrain.errors import EngineDied, EngineError, EngineStateError
from drivetrain.types.modes import MemoryTag, PauseMode


class EngineState(Enum):
    """The state of an engine, as its name is shown in errors."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    UPDATING = "updating"
    DIRTY = "dirty"
    FAILED = "failed"
    CLOSED = "closed"


class _Life(Enum):
    CREATED = "created"
    STARTING = "starting"
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class WeightState(Enum):
    """State of the weights; only CLEAN weights are served."""

    CLEAN = "clean"
    UPDATING = "updating"
    DIRTY = "dirty"
    """An update began and was not committed, or the weights slept and were not kept."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """All state that decides what an engine may do. Each transition returns the next status or raises."""

    life: _Life = _Life.CREATED
    paused: PauseMode | None = None
    asleep: frozenset[MemoryTag] = frozenset()
    weights: WeightState = WeightState.CLEAN
    why: str = ""
    """Reason for which the engine is dirty or failed."""
    died: bool = False
    """True if the engine failed because it died; False if it did not start, or could not sleep or wake up."""
    updates: int = 0
    """Number of committed weight updates."""
    left_by: tuple[tuple[MemoryTag, str], ...] = ()
    """Memory that sleeps though every holder that put it to sleep is gone, each kind with the last of these holders."""

    @property
    def state(self) -> EngineState:
        """The state that takes precedence where several hold at once."""
        if self.life is not _Life.OPEN:
            return EngineState(self.life.value)
        if self.weights is WeightState.UPDATING:
            return EngineState.UPDATING
        if self.asleep:
            return EngineState.ASLEEP
        if self.weights is WeightState.DIRTY:
            return EngineState.DIRTY
        return EngineState.PAUSED if self.paused else EngineState.READY

    def describe(self) -> str:
        """The state with its details, such as ``asleep (kv_cache)``."""
        state = self.state
        if state is EngineState.ASLEEP:
            tags = ", ".join(sorted(tag.value for tag in self.asleep))
            dirty = ", weights dirty" if self.weights is WeightState.DIRTY else ""
            return f"{state.value} ({tags}){dirty}{self._left()}"
        if state in (EngineState.DIRTY, EngineState.FAILED) and self.why:
            return f"{state.value} ({self.why})"
        value: str = state.value
        return value

    def _left(self) -> str:
        """Name the holders that are gone and have left memory asleep; empty if there are none."""
        words = ""
        for holder in dict.fromkeys(holder for _, holder in self.left_by):
            tags = frozenset(tag for tag, by in self.left_by if by == holder)
            which = "" if tags == self.asleep else " and ".join(sorted(tag.value for tag in tags)) + " "
            words += f", {which}left so by {holder}, which is gone"
        return words

    # Requirements of calls ---------------------------------------------------------------------------------------

    def require_open(self, action: str) -> None:
        """Raise unless the engine was started and neither failed nor was closed."""
        if self.life is _Life.CREATED:
            raise self._refuse(action, "start it first: 'await engine.start()' or 'async with engine:'")
        if self.life is _Life.STARTING:
            raise self._refuse(action, "wait until start() has returned")
        if self.life is _Life.FAILED:
            raise self._refuse(action, "create a new engine; a failed one does not come back")
        if self.life is _Life.CLOSED:
            raise self._refuse(action, "create a new engine")

    def require_admission(self, action: str) -> None:
        """Raise unless a request that arrives now can be served, or may wait until a pause or an update ends.

        A paused engine lets arrivals wait, also while it sleeps. An engine that only sleeps refuses them.
        """
        self.require_open(action)
        if self.asleep:
            if self.paused is not None:
                return
            tags = ", ".join(f"MemoryTag.{tag.name}" for tag in sorted(self.asleep, key=lambda tag: tag.value))
            # An update under way is no reason to refuse a request; otherwise it would be the state that is named.
            without = replace(self, weights=WeightState.CLEAN) if self.weights is WeightState.UPDATING else self
            raise without._refuse(action, f"wake it up first: 'await engine.wake_up([{tags}])'")
        if self.weights is WeightState.DIRTY:
            raise self._refuse(action, "push a complete weight update; until one is committed nothing is served")

    @property
    def holds_requests(self) -> bool:
        """True while admitted requests wait."""
        return self.paused is not None or self.weights is not WeightState.CLEAN or bool(self.asleep)

    # Transitions -------------------------------------------------------------------------------------------------

    def start(self) -> EngineStatus:
        """CREATED → STARTING."""
        if self.life is not _Life.CREATED:
            raise self._refuse("start()", "an engine starts once; create a new one")
        return replace(self, life=_Life.STARTING)

    def started(self) -> EngineStatus:
        """STARTING → READY."""
        if self.life is not _Life.STARTING:
            raise self._refuse("ready", "start() was not under way")
        return replace(self, life=_Life.OPEN)

    def fail(self, why: str, *, died: bool = False) -> EngineStatus:
        """Any → FAILED, but CLOSED stays closed. An engine that has not started does not die: it did not start."""
        if self.life is _Life.CLOSED:
            return self
        died = self.died or (died and self.life is not _Life.STARTING)
        return replace(self, life=_Life.FAILED, why=why, died=died)

    def close(self) -> EngineStatus:
        """Any → CLOSED."""
        return replace(self, life=_Life.CLOSED)

    def pause(self, mode: PauseMode) -> EngineStatus:
        """READY → PAUSED; idempotent. A paused engine can be paused again in another mode.

        Requests whose cache was released cannot get it back, so ``in_place`` after ``retract`` stays ``retract``.
        """
        self.require_open(f"pause_generation({mode.value!r})")
        self._not_updating(f"pause_generation({mode.value!r})")
        if self.paused is PauseMode.RETRACT and mode is PauseMode.IN_PLACE:
            return self
        return replace(self, paused=mode)

    def resume(self) -> EngineStatus:
        """PAUSED → READY; idempotent. Refused while the weights may not be served."""
        self.require_open("continue_generation()")
        self._not_updating("continue_generation()")
        if self.weights is WeightState.DIRTY:
            raise self._refuse("continue_generation()", "push a complete weight update first")
        return replace(self, paused=None)

    def lift_pause(self) -> EngineStatus:
        """PAUSED → not paused, for a holder that is gone. Requests stay held while the weights are dirty."""
        return replace(self, paused=None)

    def sleep(self, tags: frozenset[MemoryTag], *, keeps_weights: bool) -> EngineStatus:
        """→ ASLEEP with ``tags`` added; idempotent. Weights that are not kept become DIRTY."""
        self.require_open("sleep()")
        self._not_updating("sleep()")
        status = replace(self, asleep=self.asleep | tags, left_by=self._left_without(tags))
        if MemoryTag.WEIGHTS in tags - self.asleep and not keeps_weights:
            status = replace(status, weights=WeightState.DIRTY, why="the weights slept and were not kept")
        return status

    def wake(self, tags: frozenset[MemoryTag]) -> EngineStatus:
        """ASLEEP → fewer tags asleep; idempotent."""
        self.require_open("wake_up()")
        self._not_updating("wake_up()")
        return replace(self, asleep=self.asleep - tags, left_by=self._left_without(tags))

    def leave_asleep(self, tags: frozenset[MemoryTag], holder: str) -> EngineStatus:
        """Record that the holder which put ``tags`` to sleep is gone. They sleep until ``wake_up`` is called.

        The memory may be in use by others, and weights that were not kept would not be served.
        """
        left = sorted(tags & self.asleep, key=lambda tag: tag.value)
        return replace(self, left_by=(*self._left_without(tags), *((tag, holder) for tag in left)))

    def _left_without(self, tags: frozenset[MemoryTag]) -> tuple[tuple[MemoryTag, str], ...]:
        return tuple((tag, holder) for tag, holder in self.left_by if tag not in tags)

    def require_updatable(self) -> None:
        """Raise unless a weight update may begin."""
        self.begin_update()

    def begin_update(self) -> EngineStatus:
        """→ UPDATING. Refused while the weights sleep: there is no memory to write them to."""
        self.require_open("a weight update")
        self._not_updating("a weight update")
        if MemoryTag.WEIGHTS in self.asleep:
            raise self._refuse(
                "a weight update", "wake the weights up first: 'await engine.wake_up([MemoryTag.WEIGHTS])'"
            )
        return replace(self, weights=WeightState.UPDATING)

    def require_weights(self, action: str) -> None:
        """Raise unless the weights are in memory and committed."""
        self.require_open(action)
        self._not_updating(action)
        if MemoryTag.WEIGHTS in self.asleep:
            raise self._refuse(action, "wake the weights up first: 'await engine.wake_up([MemoryTag.WEIGHTS])'")
        if self.weights is WeightState.DIRTY:
            raise self._refuse(action, "push a complete weight update first")

    def commit_update(self) -> EngineStatus:
        """UPDATING → clean weights; the only way out of DIRTY."""
        if self.life is not _Life.OPEN or self.weights is not WeightState.UPDATING:
            raise self._refuse("commit", "no weight update is under way")
        return replace(self, weights=WeightState.CLEAN, why="", updates=self.updates + 1)

    def dirty(self, why: str) -> EngineStatus:
        """UPDATING → DIRTY."""
        return replace(self, weights=WeightState.DIRTY, why=why) if self.life is _Life.OPEN else self

    def _not_updating(self, action: str) -> None:
        if self.weights is WeightState.UPDATING:
            raise self._refuse(action, "wait until the weight update under way has ended")

    def _refuse(self, action: str, remedy: str) -> EngineError:
        if self.died:
            before = f"; it died before that ({self.why})" if self.life is _Life.CLOSED else ""
            return EngineDied(f"{action} is refused: the engine is {self.describe()}{before}; create a new engine")
        return EngineStateError(
            f"{action} is refused: the engine is {self.describe()}; {remedy}", state=self.state.value
        )
