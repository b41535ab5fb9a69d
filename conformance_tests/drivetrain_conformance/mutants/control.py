"""Abort, pause and sleep that are acknowledged, and do something else."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, TokenDelta
from drivetrain.engine.controller import Controller
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.engine.pause_and_sleep import PauseAndSleep
from drivetrain.engine.states import WeightState
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain_conformance.mutants.registry import spoiled_backend, spoiled_engine, spoiled_part
from drivetrain_conformance.mutants.spoil import SoundBackend, answering, cut, mixed

# Abort ---------------------------------------------------------------------------------------------------------------


def _aborting(backend: type[Backend], change: Callable[[GenerateResult], GenerateResult]) -> type[Backend]:
    """A backend that returns something else for aborted requests."""

    def changed(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        return change(result) if result.finish_reason is FinishReason.ABORT else result

    return answering(backend, changed)


class _Knowing(SoundBackend):
    """A backend that knows which requests are in flight."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.flying: set[str] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        with self._noted(request):
            return await super().generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        with self._noted(request):
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    yield delta

    @contextmanager
    def _noted(self, request: GenerateRequest) -> Iterator[None]:
        self.flying.add(request.request_id)
        try:
            yield
        finally:
            self.flying.discard(request.request_id)


@spoiled_backend(caught_by="abort/a_prompts_samples_end_together_or_one_by_one", says="assert")
def aborts_nothing(backend: type[Backend]) -> type[Backend]:
    """An abort is acknowledged, and the requests go on to their end."""

    class Wrong(SoundBackend):
        """Aborts nothing."""

        async def abort(self, request_ids: list[str]) -> None:
            pass

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="abort/versions_of_an_aborted_request_cover_its_tokens",
    says="assert completion.weight_versions == (VersionSpan",
)
def loses_what_was_generated_before_an_abort(backend: type[Backend]) -> type[Backend]:
    """An aborted request comes back without the tokens that it had."""
    return _aborting(backend, lambda result: cut(result, 0))


@spoiled_backend(caught_by="abort/an_abort_right_after_submission_is_not_lost", says="ended by length")
def does_not_mark_the_aborted(backend: type[Backend]) -> type[Backend]:
    """An aborted request looks like one that reached its length."""
    return _aborting(backend, lambda result: dataclasses.replace(result, finish_reason=FinishReason.LENGTH))


@spoiled_backend(caught_by="abort/an_id_that_begins_another_aborts_only_its_own", says="aborting 'req-1' ended others")
def aborts_by_prefix(backend: type[Backend]) -> type[Backend]:
    """Aborting req-1 also ends req-10."""

    class Wrong(_Knowing):
        """Compares beginnings, as one engine does."""

        async def abort(self, request_ids: list[str]) -> None:
            chosen = [known for known in self.flying if known.startswith(tuple(request_ids))]
            await super().abort(chosen)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="abort/a_prompts_samples_end_together_or_one_by_one", says="aborting the sample")
def aborts_everything(backend: type[Backend]) -> type[Backend]:
    """Aborting one request ends all."""

    class Wrong(_Knowing):
        """Knows no ids."""

        async def abort(self, request_ids: list[str]) -> None:
            await super().abort(list(self.flying))

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="pause/abort_ends_what_was_retracted", says="nats off")
def shifts_the_logprobs_of_what_was_frozen(backend: type[Backend]) -> type[Backend]:
    """A request that is aborted while it is frozen comes back with the logprobs of the tokens before."""

    class Wrong(SoundBackend):
        """Counts the token that comes next."""

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

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="pause/a_request_frozen_in_place_can_be_aborted", says="hangs")
def aborts_the_frozen_for_ever(backend: type[Backend]) -> type[Backend]:
    """An abort waits for the last step of its requests, which frozen ones never make."""

    class Wrong(SoundBackend):
        """Waits for the scheduler."""

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

    return mixed(backend, Wrong)


# Pause ---------------------------------------------------------------------------------------------------------------


@spoiled_backend(
    caught_by="pause/no_token_is_made_while_frozen_in_place",
    says="tokens were made while the request was frozen (in_place)",
)
def goes_on_generating_in_place(backend: type[Backend]) -> type[Backend]:
    """A pause in place holds arrivals, and what is in flight goes on."""

    class Wrong(SoundBackend):
        """Has no primitive for it, and says nothing."""

        async def freeze(self, mode: PauseMode) -> None:
            if mode is not PauseMode.IN_PLACE:
                await super().freeze(mode)

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="weight_sync/retracted_requests_go_on_with_the_new_weights",
    says="a token of the second span was not made by the new weights",
)
def keeps_the_cache_of_the_retracted(backend: type[Backend]) -> type[Backend]:
    """A pause with retraction keeps the cache: what goes on later goes on with keys of older weights."""

    class Wrong(SoundBackend):
        """Takes one mode for the other."""

        async def freeze(self, mode: PauseMode) -> None:
            await super().freeze(PauseMode.IN_PLACE)

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="weight_sync/retracted_requests_go_on_with_the_new_weights",
    says="the spans are (VersionSpan(version='new', start=0",
)
def restarts_the_retracted(backend: type[Backend]) -> type[Backend]:
    """Retracted requests begin again with their prompt: what they had generated is thrown away."""

    class Wrong(SoundBackend):
        """Aborts what it should retract, and submits it again."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._flying: set[str] = set()
            self._retracted: set[str] = set()
            self._thawed = asyncio.Event()

        async def freeze(self, mode: PauseMode) -> None:
            if mode is PauseMode.RETRACT:
                self._thawed.clear()
                self._retracted |= self._flying
                await super().abort(list(self._flying))
            await super().freeze(mode)

        async def unfreeze(self) -> None:
            await super().unfreeze()
            self._thawed.set()

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            while True:
                self._flying.add(request.request_id)
                try:
                    result = await super().generate(request)
                finally:
                    self._flying.discard(request.request_id)
                if request.request_id not in self._retracted or result.finish_reason is not FinishReason.ABORT:
                    return result
                await self._thawed.wait()
                self._retracted.discard(request.request_id)

    return mixed(backend, Wrong)


@spoiled_part(
    caught_by="pause/wait_lets_requests_in_flight_end", says="the pause returned while requests were in flight"
)
def pauses_without_waiting(parts: PartKinds) -> PartKinds:
    """A pause that waits for the requests in flight returns before they have ended."""

    class Wrong(PauseAndSleep):
        """Shuts the gate and leaves."""

        async def quiesce(self, mode: PauseMode) -> None:
            if mode is not PauseMode.WAIT:
                await super().quiesce(mode)

    return dataclasses.replace(parts, pauses=mixed(parts.pauses, Wrong))


@spoiled_part(caught_by="pause/a_stream_that_arrives_waits", says="assert chunks == []")
def serves_arrivals_while_paused(parts: PartKinds) -> PartKinds:
    """Requests that arrive while it is paused are served."""

    class Wrong(Controller):
        """Pauses what it has, not what comes."""

        def holds_requests(self) -> bool:
            return self.status.weights is not WeightState.CLEAN

    return dataclasses.replace(parts, controller=mixed(parts.controller, Wrong))


@spoiled_part(caught_by="pause/any_mode_may_follow_any", says="did not wait through abort")
def aborts_what_waits_at_a_pause(parts: PartKinds) -> PartKinds:
    """A pause that aborts also ends requests that were waiting, which should run later."""

    class Wrong(PauseAndSleep):
        """Aborts every request of the engine."""

        async def quiesce(self, mode: PauseMode) -> None:
            if mode is PauseMode.ABORT:
                await self.in_flight.abort(None)
            await super().quiesce(mode)

    return dataclasses.replace(parts, pauses=mixed(parts.pauses, Wrong))


@spoiled_engine(
    caught_by="pause/an_unknown_mode_is_refused", says="there is no pause mode 'hibernate', but it was taken"
)
def takes_any_pause_mode(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """An unknown pause mode is taken for abort."""

    class Wrong(InferenceEngine):
        """Has a default for what it does not know."""

        async def pause_generation(
            self, mode: PauseMode | str = PauseMode.ABORT, *, timeout: float | None = None
        ) -> None:
            known = mode in {known.value for known in PauseMode} or isinstance(mode, PauseMode)
            await super().pause_generation(mode if known else PauseMode.ABORT, timeout=timeout)

    return mixed(engine, Wrong)


# Sleep ---------------------------------------------------------------------------------------------------------------


@spoiled_backend(caught_by="sleep/the_memory_of_the_cache_comes_back", says="MiB came back, of")
def gives_no_memory_back(backend: type[Backend]) -> type[Backend]:
    """Sleep is acknowledged, and all memory stays where it is."""

    class Wrong(SoundBackend):
        """Only says that it sleeps."""

        async def sleep(self, tags: frozenset[MemoryTag]) -> None:
            pass

        async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
            pass

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="sleep/the_memory_of_the_cache_comes_back", says="MiB came back, of")
def gives_half_of_the_memory_back(backend: type[Backend]) -> type[Backend]:
    """While the cache sleeps, half of its memory is held for something else."""

    class Wrong(SoundBackend):
        """Keeps as much as half of the cache took."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._kept = b""

        async def sleep(self, tags: frozenset[MemoryTag]) -> None:
            held = (await self.stats()).kv_cache_bytes
            await super().sleep(tags)
            self._kept = b"x" * (held // 2)

        async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
            self._kept = b""
            await super().wake_up(tags)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="sleep/many_cycles_of_the_cache_hold_no_more_memory", says="MiB more were held in the end")
def leaks_memory_at_each_sleep(backend: type[Backend]) -> type[Backend]:
    """Each cycle of sleep and wake-up costs a few megabytes for good."""

    class Wrong(SoundBackend):
        """Keeps what it should have let go."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._kept: list[bytes] = []

        async def sleep(self, tags: frozenset[MemoryTag]) -> None:
            await super().sleep(tags)
            self._kept.append(b"x" * 2**23)

    return mixed(backend, Wrong)


@spoiled_part(
    caught_by="sleep/a_sleeping_engine_refuses_by_name", says="an engine that is asleep did what it was asked to do"
)
def serves_while_its_cache_sleeps(parts: PartKinds) -> PartKinds:
    """Requests are served while the KV cache's memory is given back."""

    class Wrong(Controller):
        """Looks at its weights only."""

        def holds_requests(self) -> bool:
            return MemoryTag.WEIGHTS in self.status.asleep or self.status.weights is not WeightState.CLEAN

        def require_admission(self, action: str) -> None:
            asleep = self.status.asleep - {MemoryTag.KV_CACHE}
            dataclasses.replace(self.status, asleep=asleep).require_admission(action)

    return dataclasses.replace(parts, controller=mixed(parts.controller, Wrong))


@spoiled_backend(
    caught_by="sleep/kept_weights_come_back_as_they_were",
    says=("nats below the most likely one", "NaN or infinite logits"),  # memory may hold either
)
def says_that_it_keeps_weights(backend: type[Backend]) -> type[Backend]:
    """It claims that weights which slept come back by themselves, and they come back as anything."""

    class Wrong(SoundBackend):
        """Takes the field and keeps no copy."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config.model_copy(update={"sleep_keeps_weights": False}))

        @classmethod
        def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
            return super().capabilities(config) | {Capability.SLEEP_KEEPS_WEIGHTS}

    return mixed(backend, Wrong)


@spoiled_part(caught_by="sleep/weights_that_slept_are_not_served", says="assert engine.state is EngineState.DIRTY")
def is_ready_without_weights(parts: PartKinds) -> PartKinds:
    """After its weights slept and were lost it wakes up ready, and answers with gibberish."""

    class Wrong(PauseAndSleep):
        """Takes awake for ready."""

        async def wake_up(self, tags: Iterable[MemoryTag | str] | None, timeout: float | None) -> None:
            await super().wake_up(tags, timeout)
            status = self.controller.status
            if not status.asleep:
                self.controller.move_to(dataclasses.replace(status, weights=WeightState.CLEAN))

    return dataclasses.replace(parts, pauses=mixed(parts.pauses, Wrong))


@spoiled_part(
    caught_by="sleep/requests_in_flight_are_not_sleeps_to_decide",
    says="the engine fell asleep, though requests were in flight",
)
def sleeps_over_requests(parts: PartKinds) -> PartKinds:
    """Sleep aborts requests in flight, though its arguments did not say so."""

    class Wrong(PauseAndSleep):
        """Clears the way."""

        async def clear_for_sleep(self, abort_first: bool, drain_timeout: float) -> None:
            await super().clear_for_sleep(True, drain_timeout)

    return dataclasses.replace(parts, pauses=mixed(parts.pauses, Wrong))
