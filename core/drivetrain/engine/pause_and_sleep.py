"""Pauses, sleep and caches: they decide about requests in flight and about the engine's memory."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, nullcontext
from typing import ClassVar

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.uninterrupted import to_its_end
from drivetrain.engine.controller import Controller
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.engine.states import EngineStatus
from drivetrain.engine.validation import check_seconds
from drivetrain.errors import DeadlineExceeded, EngineBusy, EngineInternalError, EngineStateError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode

logger = logging.getLogger("drivetrain.engine")

PAUSE_CAPABILITY = {
    PauseMode.ABORT: Capability.PAUSE_ABORT,
    PauseMode.WAIT: Capability.PAUSE_WAIT,
    PauseMode.IN_PLACE: Capability.PAUSE_IN_PLACE,
    PauseMode.RETRACT: Capability.PAUSE_RETRACT,
}
SLEEP_CAPABILITY = {
    MemoryTag.WEIGHTS: Capability.SLEEP_WEIGHTS,
    MemoryTag.KV_CACHE: Capability.SLEEP_KV_CACHE,
    MemoryTag.CUDA_GRAPH: Capability.SLEEP_CUDA_GRAPH,
}


class PauseAndSleep:
    """Pauses and resumes requests, gives memory back and takes it again.

    It knows whether the backend holds frozen requests; everything else it needs is in the controller's status.
    """

    sleeps_late: ClassVar[bool] = True
    """True if memory may fall asleep after the deadline of a sleep, which then leaves the engine asleep."""

    def __init__(self, controller: Controller, backend: Backend, in_flight: RequestsInFlight) -> None:
        self.controller = controller
        self.backend = backend
        self.in_flight = in_flight
        self._frozen = False
        """True from the backend's ``freeze`` until its ``unfreeze``."""
        self._paused_by: set[object] = set()
        """Everyone who has paused the engine and not let it go on, by holder; None stands for the owner."""
        self._slept_by: dict[MemoryTag, set[object]] = {}
        """Everyone who has put each kind of sleeping memory to sleep, by holder; None stands for the owner."""
        self._unsure: frozenset[MemoryTag] = frozenset()
        """Memory whose newest sleep or wake-up did not succeed: it may be asleep, awake or on its way."""

    # Pause -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, timeout: float | None, *, by: object = None) -> None:
        """Pause for a holder, or for the owner; see ``InferenceEngine.pause_generation``."""
        seconds = check_seconds(timeout, self.controller.config.timeouts.control)
        self.controller.require("pause_generation()", PAUSE_CAPABILITY[mode])
        self.controller.status.pause(mode)
        async with (
            self.controller.controlling("pause_generation()"),
            deadline(seconds, f"generation to pause ({mode.value})"),
        ):
            before = self.controller.status
            self.refuse_waiting_for_frozen(mode)
            self.controller.move_to(before.pause(mode))
            try:
                await self.quiesce(mode, seconds)
            except BaseException:
                await to_its_end(self._go_on(before))
                raise
            self._paused_by.add(by)

    async def resume(self) -> None:
        """Let frozen and waiting requests go on."""
        self.controller.status.require_open("continue_generation()")
        async with self.controller.controlling("continue_generation()"):
            await to_its_end(self._go_on(self.controller.status.resume()))

    async def drop_pause_of(self, holder: object) -> None:
        """Drop the pause of a holder that is gone; the engine stays paused for those who paused it too."""
        if holder not in self._paused_by:
            return
        self._paused_by.discard(holder)  # at once: another change of state may outlast the wait for its end
        async with self.controller.controlling("continue_generation()"):
            if not self._paused_by:  # also if somebody let the engine go on meanwhile: lifting no pause changes nothing
                await self.lift()

    async def lift(self) -> None:
        """End the pause, in a change of state. If weights are dirty, requests stay frozen until the next update."""
        await to_its_end(self._go_on(self.controller.status.lift_pause()))

    async def _go_on(self, after: EngineStatus) -> None:
        """Take the next status, and unfreeze requests unless it keeps them frozen."""
        await self.unfreeze_if_free(after)
        if after.paused is None:
            self._paused_by.clear()
        self._slept_by = {tag: holders for tag, holders in self._slept_by.items() if tag in after.asleep}
        self.controller.move_to(after)

    async def quiesce(self, mode: PauseMode, seconds: float) -> None:
        """Abort, await or freeze the requests in flight, as ``mode`` says. The gate is shut.

        A freeze takes at most ``seconds``, and is not interrupted: otherwise the engine would not know if requests are
        frozen.
        """
        match mode:
            case PauseMode.ABORT:
                await self.in_flight.abort_running()
                await self.in_flight.drained_first()
            case PauseMode.WAIT:
                await self.in_flight.drained_first()
            case PauseMode.IN_PLACE | PauseMode.RETRACT:
                self._frozen = True
                await to_its_end(self._freeze(mode, seconds))

    async def _freeze(self, mode: PauseMode, seconds: float) -> None:
        async with deadline(seconds, f"requests to freeze ({mode.value})"):
            await self.backend.freeze(mode)

    def refuse_waiting_for_frozen(self, mode: PauseMode) -> None:
        """Raise :class:`EngineStateError` if ``mode`` would wait for requests that are frozen."""
        # A pause, a sleep or a failed update that holds requests at the gate has frozen those in flight.
        status, running = self.controller.status, self.in_flight.running
        if mode is PauseMode.WAIT and status.holds_requests and running:
            raise EngineStateError(
                f"mode='wait' would wait for ever: {running} requests in flight are frozen, for the "
                f"engine is {status.describe()}; use 'retract', 'in_place' or 'abort', or let them go on first",
                state=status.state.value,
            )

    def will_be_frozen(self) -> None:
        """Record that the backend freezes requests as part of a weight update."""
        self._frozen = True

    def were_unfrozen(self) -> None:
        """Record that the backend unfroze requests as part of a weight update."""
        self._frozen = False

    async def unfreeze_if_free(self, after: EngineStatus) -> None:
        """Unfreeze requests unless ``after``, the next status, keeps them frozen."""
        if self._frozen and not after.holds_requests:
            async with self.controller.bounded("frozen requests to go on"):
                await self.backend.unfreeze()
            self._frozen = False

    # Sleep -------------------------------------------------------------------------------------------------------

    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None,
        timeout: float | None,
        abort_first: bool,
        drain_timeout: float,
        *,
        by: object = None,
    ) -> None:
        """Free memory for a holder, or for the owner; see ``InferenceEngine.sleep``."""
        controller = self.controller
        chosen = self._chosen(tags, "sleep()")
        seconds = check_seconds(timeout, controller.config.timeouts.control)
        keeps = controller.config.sleep_keeps_weights
        controller.status.sleep(chosen, keeps_weights=keeps)
        owning = controller.owning_weights("sleep()") if MemoryTag.WEIGHTS in chosen else nullcontext()
        async with owning, controller.controlling("sleep()"):
            with controller.shut_gate():
                await self.clear_for_sleep(abort_first, drain_timeout)
                after = controller.status.sleep(chosen, keeps_weights=keeps)
                awake = (chosen - controller.status.asleep) | (chosen & self._unsure)
                await to_its_end(self._fall_asleep(chosen, awake, after, seconds, by))

    async def _fall_asleep(
        self,
        chosen: frozenset[MemoryTag],
        awake: frozenset[MemoryTag],
        after: EngineStatus,
        seconds: float,
        by: object,
    ) -> None:
        try:
            if awake:
                async with self._changing(awake), deadline(seconds, "the engine to fall asleep"):
                    await self.backend.sleep(awake)
        except DeadlineExceeded:
            if self.sleeps_late:
                self.fell_asleep(chosen, after, by)
            raise
        self.fell_asleep(chosen, after, by)

    def fell_asleep(self, tags: frozenset[MemoryTag], after: EngineStatus, by: object) -> None:
        """Take the next status, and note who wants these kinds of memory to sleep, whether they slept before or not."""
        for tag in tags:
            self._slept_by.setdefault(tag, set()).add(by)
        self.controller.move_to(after)

    async def drop_sleep_of(self, holder: object, name: str) -> None:
        """Forget a holder that is gone; memory that it alone had put to sleep stays asleep, and is left so by it."""
        slept = {tag for tag, holders in self._slept_by.items() if holder in holders}
        if not slept:
            return
        for tag in slept:
            self._slept_by[tag].discard(holder)
        async with self.controller.controlling("sleep()"):
            if left := frozenset(tag for tag in slept if not self._slept_by.get(tag, {None})):
                self.leave_asleep(left, name)

    def leave_asleep(self, tags: frozenset[MemoryTag], holder: str) -> None:
        """Record that the holder that put ``tags`` to sleep is gone. They sleep on; see :class:`EngineStatus`."""
        self.controller.move_to(self.controller.status.leave_asleep(tags, holder))
        logger.warning("%s is gone and has left the engine asleep; wake it up to use it", holder)

    async def clear_for_sleep(self, abort_first: bool, drain_timeout: float) -> None:
        """Abort or await the requests in flight; retracted ones hold no cache and may stay.

        Raises:
            EngineBusy: requests are still in flight after ``drain_timeout``.
        """
        if not self.in_flight.running or self.controller.status.paused is PauseMode.RETRACT:
            return
        if abort_first:
            self.controller.require_claimed("sleep(abort_first=True)", Capability.ABORT)
            async with self.controller.bounded("aborted requests to end before sleep"):
                await self.in_flight.abort_running()
                await self.in_flight.drained()
            return
        try:
            async with deadline(drain_timeout, "requests in flight to end before sleep"):
                await self.in_flight.drained()
        except DeadlineExceeded:
            raise EngineBusy(
                f"sleep() is refused: {self.in_flight.running} requests are in flight after "
                f"drain_timeout={drain_timeout:g} s; abort them (abort_first=True), "
                "give them longer, or pause_generation('retract') first"
            ) from None

    async def wake_up(self, tags: Iterable[MemoryTag | str] | None, timeout: float | None) -> None:
        """Allocate memory again; see ``InferenceEngine.wake_up``."""
        chosen = self._chosen(tags, "wake_up()")
        seconds = check_seconds(timeout, self.controller.config.timeouts.control)
        self.controller.status.wake(chosen)
        async with self.controller.controlling("wake_up()"):
            after = self.controller.status.wake(chosen)
            await to_its_end(self._awaken(self.to_wake(chosen), after, seconds))

    def to_wake(self, chosen: frozenset[MemoryTag]) -> frozenset[MemoryTag]:
        """Return which of the chosen memory the backend must wake up."""
        return chosen & self.controller.status.asleep

    async def _awaken(self, waking: frozenset[MemoryTag], after: EngineStatus, seconds: float) -> None:
        if waking:
            async with self._changing(waking), deadline(seconds, "the engine to wake up"):
                await self.backend.wake_up(waking)
        await self._go_on(after)

    @asynccontextmanager
    async def _changing(self, tags: frozenset[MemoryTag]) -> AsyncGenerator[None, None]:
        """Put ``tags`` to sleep or wake them up in this context.

        An internal error fails the engine: an unknown part of its memory may be gone.
        """
        self._unsure |= tags
        try:
            yield
            self._unsure -= tags
        except EngineInternalError as error:
            self.controller.fail(str(error))
            raise

    def _chosen(self, tags: Iterable[MemoryTag | str] | None, action: str) -> frozenset[MemoryTag]:
        controller = self.controller
        controller.status.require_open(action)
        able = frozenset(tag for tag, capability in SLEEP_CAPABILITY.items() if capability in controller.capabilities)
        if tags is None:
            if not able:
                controller.require_claimed(action, Capability.SLEEP_KV_CACHE)
            return able
        chosen = frozenset(MemoryTag(tag) for tag in tags)
        if not chosen:
            raise InvalidRequest(f"{action}: tags is empty; name some, or give None for all", field="tags")
        for tag in chosen:
            controller.require_claimed(f"{action} of {tag.value}", SLEEP_CAPABILITY[tag])
        return chosen

    # Caches ------------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        """Discard every cached prefix."""
        self.controller.require("reset_prefix_cache()", Capability.PREFIX_CACHE)
        async with self.controller.bounded("the prefix cache to be reset"):
            await self.backend.reset_prefix_cache()

    async def clear_hicache_storage(self) -> None:
        """Clear the storage tier of a hierarchical cache."""
        self.controller.require("clear_hicache_storage()", Capability.HICACHE_STORAGE)
        async with self.controller.bounded("the cache storage to be cleared"):
            await self.backend.clear_hicache_storage()
