"""Abort, pause and sleep that are acknowledged, and do something else."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable

from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult
from drivetrain.engine.controller import Controller
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.pause_and_sleep import PauseAndSleep
from drivetrain.engine.states import EngineStatus, WeightState
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain_conformance.mutants.registry import backend_mutants, mutant, spoiled_backend
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    KnowingRequests,
    KnowingSleep,
    answering,
    cut,
    own,
    resubmitting,
)

# Abort ---------------------------------------------------------------------------------------------------------------


def _aborting(backend: type[Backend], change: Callable[[GenerateResult], GenerateResult]) -> type[Backend]:
    """A backend that returns something else for aborted requests."""

    def changed(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        return change(result) if result.finish_reason is FinishReason.ABORT else result

    return answering(backend, changed)


aborted_mutant = backend_mutants(_aborting)


@mutant("abort/a_prompts_samples_end_together_or_one_by_one", says="assert")
class aborts_nothing(CorrectBackend):
    """An abort is acknowledged, and the requests go on to their end."""

    async def abort(self, request_ids: list[str]) -> None:
        pass


@aborted_mutant(
    "abort/versions_of_an_aborted_request_cover_its_tokens", says="assert completion.weight_versions == (VersionSpan"
)
def loses_what_was_generated_before_an_abort(result: GenerateResult) -> GenerateResult:
    """An aborted request comes back without the tokens that it had."""
    return cut(result, 0)


@mutant("abort/an_abort_right_after_submission_is_not_lost", says="aborted while its grammar was compiled")
class loses_aborts_of_the_constrained(CorrectBackend):
    """An abort does not reach a request that waits for its grammar."""

    _constrained: set[str] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.params.structured_output is None:
            return await super().generate(request)
        self._constrained.add(request.request_id)
        try:
            return await super().generate(request)
        finally:
            self._constrained.discard(request.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        await super().abort([one for one in request_ids if one not in self._constrained])


@aborted_mutant("abort/an_abort_right_after_submission_is_not_lost", says="ended by length")
def does_not_mark_the_aborted(result: GenerateResult) -> GenerateResult:
    """An aborted request looks like one that reached its length."""
    return dataclasses.replace(result, finish_reason=FinishReason.LENGTH)


@mutant("abort/an_id_that_begins_another_aborts_only_its_own", says="aborting 'req-1' ended others")
class aborts_by_prefix(KnowingRequests):
    """Aborting req-1 also ends req-10."""

    async def abort(self, request_ids: list[str]) -> None:
        chosen = [known for known in self.flying if known.startswith(tuple(request_ids))]
        await super().abort(chosen)


@mutant("abort/a_prompts_samples_end_together_or_one_by_one", says="aborting the sample")
class aborts_everything(KnowingRequests):
    """Aborting one request ends all."""

    async def abort(self, request_ids: list[str]) -> None:
        await super().abort(list(self.flying))


@mutant("pause/abort_ends_what_was_retracted", says="nats off")
class shifts_the_logprobs_of_what_was_frozen(CorrectBackend):
    """A request that is aborted while it is frozen comes back with the logprobs of the tokens before."""

    is_frozen = False

    async def freeze(self, mode: PauseMode) -> None:
        self.is_frozen = True
        await super().freeze(mode)

    async def unfreeze(self) -> None:
        self.is_frozen = False
        await super().unfreeze()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if not self.is_frozen or not result.logprobs:
            return result
        return dataclasses.replace(result, logprobs=[0.0, *result.logprobs[:-1]])


@mutant("pause/a_request_frozen_in_place_can_be_aborted", says=("hangs", "waiting for the abort to reach"))
class aborts_the_frozen_for_ever(CorrectBackend):
    """An abort waits for the last step of its requests, which frozen ones never make."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._stepping = asyncio.Event()
        self._stepping.set()

    async def freeze(self, mode: PauseMode) -> None:
        self._stepping.clear()
        await super().freeze(mode)

    async def unfreeze(self) -> None:
        await super().unfreeze()
        self._stepping.set()

    async def abort(self, request_ids: list[str]) -> None:
        await self._stepping.wait()
        await super().abort(request_ids)


# Pause ---------------------------------------------------------------------------------------------------------------


@mutant("pause/no_token_is_made_while_frozen_in_place", says="tokens were made while the request was frozen (in_place)")
class goes_on_generating_in_place(CorrectBackend):
    """A pause in place holds arrivals, and requests in flight go on."""

    async def freeze(self, mode: PauseMode) -> None:
        if mode is not PauseMode.IN_PLACE:
            await super().freeze(mode)


@mutant("pause/in_place_freezes_requests_in_flight", says="requests frozen in the batch it counts")
class counts_the_frozen_as_waiting(CorrectBackend):
    """Requests that are frozen in place are counted as waiting, not as running."""

    frozen = False

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(mode)
        self.frozen = True

    async def unfreeze(self) -> None:
        self.frozen = False
        await super().unfreeze()

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        if not self.frozen:
            return stats
        return dataclasses.replace(stats, running=0, waiting=stats.waiting + stats.running)


@mutant("pause/one_freeze_can_follow_the_other", says="if retracted last")
class retracts_nothing_that_is_frozen(CorrectBackend):
    """A retraction of requests that are frozen in place changes nothing."""

    frozen = False

    async def freeze(self, mode: PauseMode) -> None:
        if not self.frozen:
            self.frozen = True
            await super().freeze(mode)

    async def unfreeze(self) -> None:
        self.frozen = False
        await super().unfreeze()


@mutant(
    "weight_sync/retracted_requests_go_on_with_the_new_weights",
    says="a token of the second span was not made by the new weights",
)
class keeps_the_cache_of_the_retracted(CorrectBackend):
    """A pause with retraction keeps the cache: requests later go on with keys of older weights."""

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(PauseMode.IN_PLACE)


@spoiled_backend(
    caught_by="weight_sync/retracted_requests_go_on_with_the_new_weights",
    says="the spans are (VersionSpan(version='new', start=0",
)
def restarts_the_retracted(backend: type[Backend]) -> type[Backend]:
    """Retracted requests begin again with their prompt: their generated tokens are thrown away."""
    return resubmitting(
        PauseMode.RETRACT,
        backend,
        lambda request: request,
        left=lambda request, _: request,
        join=lambda _, last: last,
    )


@mutant("pause/wait_lets_requests_in_flight_end", says="the pause returned while requests were in flight")
class pauses_without_waiting(PauseAndSleep):
    """A pause that waits for the requests in flight returns before they have ended."""

    async def quiesce(self, mode: PauseMode, seconds: float) -> None:
        if mode is not PauseMode.WAIT:
            await super().quiesce(mode, seconds)


@mutant("pause/a_stream_that_arrives_waits", says="assert chunks == []")
class serves_arrivals_while_paused(Controller):
    """Requests that arrive while it is paused are served."""

    def holds_requests(self) -> bool:
        return self.status.weights is not WeightState.CLEAN


@mutant("pause/any_mode_may_follow_any", says="did not wait through abort")
class aborts_what_waits_at_a_pause(PauseAndSleep):
    """A pause that aborts also ends requests that were waiting, which should run later."""

    async def quiesce(self, mode: PauseMode, seconds: float) -> None:
        if mode is PauseMode.ABORT:
            await self.in_flight.abort(None)
        await super().quiesce(mode, seconds)


@mutant("pause/an_unknown_mode_is_refused", says="there is no pause mode 'hibernate', but it was taken")
class takes_any_pause_mode(InferenceEngine):
    """An unknown pause mode is taken for abort."""

    async def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT, *, timeout: float | None = None) -> None:
        known = mode in {known.value for known in PauseMode} or isinstance(mode, PauseMode)
        await super().pause_generation(mode if known else PauseMode.ABORT, timeout=timeout)


@mutant("pause/in_place_freezes_requests_in_flight", says="the pause of a holder that was killed did not end")
class keeps_the_pause_of_a_gone_holder(PauseAndSleep):
    """The pause of a holder outlives the holder, which alone could end it."""

    async def lift(self) -> None:
        pass


@mutant("pause/in_place_freezes_requests_in_flight", says="hangs: what was awaited")
class lifts_a_pause_and_freezes_on(PauseAndSleep):
    """The pause of a holder that is gone ends, and the requests stay frozen."""

    async def lift(self) -> None:
        self.controller.move_to(self.controller.status.lift_pause())


@mutant("pause/a_frozen_call_that_is_cancelled_is_gone", says="hangs")
class freezes_when_a_pause_is_given_up(PauseAndSleep):
    """A pause whose caller has left is no pause any more, and requests stay frozen."""

    async def pause(self, mode: PauseMode, timeout: float | None, *, by: object = None) -> None:
        try:
            await super().pause(mode, timeout, by=by)
        except asyncio.CancelledError:
            if mode is PauseMode.IN_PLACE:
                await self.backend.freeze(mode)
            raise


@mutant(
    "weight_sync/an_update_that_breaks_off_leaves_the_engine_dirty",
    says="the pause and the update of a holder that was killed did not end",
)
class keeps_the_pause_of_one_gone_in_an_update(PauseAndSleep):
    """A holder that dies within a weight update leaves its pause: a dirty engine refuses to go on."""

    async def lift(self) -> None:
        self.controller.status.resume()
        await super().lift()


# Sleep ---------------------------------------------------------------------------------------------------------------


@mutant("sleep/the_memory_of_the_cache_comes_back", says="MiB came back, of")
class gives_half_of_the_memory_back(CorrectBackend):
    """While the cache sleeps, half of its memory is held for something else."""

    _kept = b""

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        held = (await self.stats()).kv_cache_bytes
        await super().sleep(tags)
        self._kept = b"x" * (held // 2)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        self._kept = b""
        await super().wake_up(tags)


@mutant("sleep/the_memory_of_the_cache_comes_back", says="a pause gave")
class gives_the_cache_back_in_a_pause(CorrectBackend):
    """A pause frees the memory of the KV cache, and its end takes it again."""

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(mode)
        await super().sleep(frozenset({MemoryTag.KV_CACHE}))

    async def unfreeze(self) -> None:
        await super().wake_up(frozenset({MemoryTag.KV_CACHE}))
        await super().unfreeze()


@mutant("sleep/half_awake_can_sleep_again", says="bytes of weights with it")
class wakes_weights_with_the_cache(CorrectBackend):
    """Waking the cache takes the memory of weights that are asleep too."""

    asleep = False

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        await super().sleep(tags)
        self.asleep |= MemoryTag.WEIGHTS in tags

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        woken = tags | ({MemoryTag.WEIGHTS} if self.asleep else set())
        await super().wake_up(woken if self.asleep else tags - {MemoryTag.WEIGHTS})
        self.asleep = False


class _LosingBuffers(KnowingSleep):
    """Base class of mutants that lose the buffers of positions: a prompt is read in any order from then on."""

    buffers_lost = False

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate with the buffers, or without."""
        if self.buffers_lost:
            request = dataclasses.replace(request, prompt_token_ids=sorted(request.prompt_token_ids))
        return await super().generate(request)


@mutant("sleep/any_order_of_tags", says="token")
class wakes_the_cache_over_buffers_asleep(_LosingBuffers):
    """Buffers of sleeping weights are lost when the cache wakes before them."""

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await super().wake_up(tags)
        self.buffers_lost |= self.weights_sleep


@mutant("sleep/a_sleeping_engine_refuses_by_name", says="token")
class frees_buffers_with_the_cache(_LosingBuffers):
    """Buffers sleep with the cache, and do not come back."""

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        await super().sleep(tags)
        self.buffers_lost |= MemoryTag.KV_CACHE in tags


@mutant("sleep/many_cycles_of_the_cache_hold_no_more_memory", says="more bytes of memory")
class leaks_memory_at_each_sleep(CorrectBackend):
    """Each cycle of sleep and wake-up costs a few megabytes for good."""

    _kept: list[bytes] = own(list)

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        await super().sleep(tags)
        self._kept.append(b"x" * 2**23)


@mutant("sleep/a_sleeping_engine_refuses_by_name", says="an engine that is asleep did what it was asked to do")
class serves_while_its_cache_sleeps(Controller):
    """Requests are served while the KV cache's memory is given back."""

    def holds_requests(self) -> bool:
        return MemoryTag.WEIGHTS in self.status.asleep or self.status.weights is not WeightState.CLEAN

    def require_admission(self, action: str) -> None:
        asleep = self.status.asleep - {MemoryTag.KV_CACHE}
        dataclasses.replace(self.status, asleep=asleep).require_admission(action)


@mutant(
    "sleep/kept_weights_come_back_as_they_were", says=("nats below the most likely one", "NaN or infinite logits")
)  # freed memory may hold other weights or NaN
class says_that_it_keeps_weights(CorrectBackend):
    """It claims that weights which slept come back by themselves, and they come back as anything."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"sleep_keeps_weights": False}))

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) | {Capability.SLEEP_KEEPS_WEIGHTS}


@mutant("sleep/an_update_mends_weights_that_slept", says="EngineInternalError")
class forgets_a_sleep_that_was_given_up(PauseAndSleep):
    """An engine whose weights fell asleep after the caller had left is ready, without weights."""

    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None,
        timeout: float | None,
        abort_first: bool,
        drain_timeout: float,
        *,
        by: object = None,
    ) -> None:
        before = self.controller.status
        try:
            await super().sleep(tags, timeout, abort_first, drain_timeout, by=by)
        except asyncio.CancelledError:
            self.controller.move_to(before)
            raise


@mutant("sleep/a_caller_that_went_away_does_not_disturb_a_sleep", says="nobody knows if it sleeps")
class fails_when_a_sleep_is_given_up(PauseAndSleep):
    """An engine that was falling asleep when the caller left counts as failed."""

    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None,
        timeout: float | None,
        abort_first: bool,
        drain_timeout: float,
        *,
        by: object = None,
    ) -> None:
        try:
            await super().sleep(tags, timeout, abort_first, drain_timeout, by=by)
        except asyncio.CancelledError:
            self.controller.fail("nobody knows if it sleeps")
            raise


@mutant("sleep/a_training_step", says="a sleep, an update or a wake-up ended the pause")
class resumes_when_it_wakes(PauseAndSleep):
    """Waking all memory ends a pause."""

    async def wake_up(self, tags: Iterable[MemoryTag | str] | None, timeout: float | None) -> None:
        await super().wake_up(tags, timeout)
        if self.controller.status.paused and not self.controller.status.asleep:
            await self.resume()


@mutant("sleep/many_callers_at_once", says="word of a holder that was killed after it put the engine to sleep")
class wakes_up_when_a_holder_is_gone(PauseAndSleep):
    """An engine wakes up by itself when the holder is gone that put it to sleep, whoever uses the memory by then."""

    def leave_asleep(self, tags: frozenset[MemoryTag], holder: str) -> None:
        self.controller.move_to(self.controller.status.wake(frozenset(MemoryTag)))


@mutant("sleep/many_callers_at_once", says="word of a holder that was killed after it put the engine to sleep")
class does_not_say_who_left_it_asleep(PauseAndSleep):
    """An engine that a gone holder left asleep does not say so: callers wait for the holder to wake it up."""

    def leave_asleep(self, tags: frozenset[MemoryTag], holder: str) -> None:
        pass


@mutant("sleep/many_callers_at_once", says="this holder has put it to sleep too")
class keeps_the_name_of_a_gone_holder(PauseAndSleep):
    """An engine that slept already names the holder that left it asleep, also when another one puts it to sleep."""

    def fell_asleep(self, tags: frozenset[MemoryTag], after: EngineStatus, by: object) -> None:
        left_by = self.controller.status.left_by
        super().fell_asleep(tags, dataclasses.replace(after, left_by=left_by), by)


@mutant("sleep/many_callers_at_once", says="ended a pause that it shared")
class lifts_a_pause_that_others_share(PauseAndSleep):
    """The pause of a holder that is gone ends, whoever has paused beside it."""

    async def drop_pause_of(self, holder: object) -> None:
        async with self.controller.controlling("continue_generation()"):
            await self.lift()


@mutant("sleep/weights_that_slept_are_not_served", says="assert engine.state is EngineState.DIRTY")
class is_ready_without_weights(PauseAndSleep):
    """An engine whose weights were lost in sleep wakes up READY, and answers with gibberish."""

    async def wake_up(self, tags: Iterable[MemoryTag | str] | None, timeout: float | None) -> None:
        await super().wake_up(tags, timeout)
        status = self.controller.status
        if not status.asleep:
            self.controller.move_to(dataclasses.replace(status, weights=WeightState.CLEAN))


@mutant(
    "sleep/requests_in_flight_are_not_sleeps_to_decide", says="the engine fell asleep, though requests were in flight"
)
class sleeps_over_requests(PauseAndSleep):
    """Sleep aborts requests in flight, though its arguments did not say so."""

    async def clear_for_sleep(self, abort_first: bool, drain_timeout: float) -> None:
        await super().clear_for_sleep(True, drain_timeout)
