"""The state that a holder sees is no older than its own last call, however late the owner's words arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from drivetrain import (
    DiskSource,
    EngineStateError,
    InferenceEngine,
    MemoryTag,
    PauseMode,
    SamplingParams,
    WeightTransferFailed,
    WeightUpdateRequest,
    attach,
)
from drivetrain.types.weights import ApplyUpdate, LoraSource, WeightReply
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_conformance.harness.time_limits import within
from engines import OpenEngine, owner_of, until
from remote_hosts import Wire, wired

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
BOUND = 60.0
TURNS = 50
"""Turns of the event loop in which a cancelled call would have returned that waits for nothing."""


@dataclass
class Held:
    """An engine, and the page of a holder to which the owner's words can be held back."""

    engine: InferenceEngine
    page: InferenceEngine
    wire: Wire
    adapter: str

    def seen(self, page: InferenceEngine) -> tuple[object, ...]:
        """Return all state that a holder mirrors."""
        return page.status, page.is_paused, page.get_weight_version(), page.parts.loaded_adapters.names

    async def cancel(self, call: Coroutine[object, object, object], begun: Callable[[], bool], times: int = 1) -> None:
        """Cancel a call of the holder once ``begun`` holds for the owner, and nothing the owner says has arrived."""
        self.wire.hold_answers()
        task = asyncio.ensure_future(call)
        await until(begun)
        for _ in range(times):
            task.cancel()
            for _ in range(TURNS):
                await asyncio.sleep(0)
        self.wire.let_answers_pass()
        async with within(seconds=BOUND):
            await asyncio.wait([task])
        assert task.cancelled()


@asynccontextmanager
async def held(open_engine: OpenEngine, model: Path, folder: Path, **timeouts: float) -> AsyncIterator[Held]:
    adapter = str(make_adapter(model, folder, seed=1).path)
    # Pulses are held back, too.
    fields = {"enable_sleep": True, "enable_lora": True, "timeouts": {"heartbeat": 600, **timeouts}}
    async with open_engine(**fields) as engine, wired(engine) as (wire, handle):
        page = await attach(handle)
        try:
            yield Held(engine, page, wire, adapter)
        finally:
            wire.let_answers_pass()
            await page.teardown()


def update_from(model: Path) -> WeightUpdateRequest:
    return WeightUpdateRequest(version="pushed", source=DiskSource(path=str(model)), mode=PauseMode.RETRACT)


Call = Callable[[Held, Path], Coroutine[object, object, object]]
Begun = Callable[[Held], bool]


def _loads(held: Held, model: Path) -> Coroutine[object, object, object]:
    return held.page.load_lora_adapter("b", held.adapter)


def _updates_an_adapter(held: Held, model: Path) -> Coroutine[object, object, object]:
    source = LoraSource(lora_name="b", path=held.adapter)
    return held.page.update_named_weights(WeightUpdateRequest(version="adapted", source=source))


@pytest.mark.parametrize(
    ("call", "begun"),
    [
        (_loads, lambda held: "b" in held.engine.parts.loaded_adapters.names),
        (_updates_an_adapter, lambda held: held.engine.get_weight_version() == "adapted"),
        (lambda held, _: held.page.pause_generation(PauseMode.IN_PLACE), lambda held: held.engine.is_paused),
        (lambda held, _: held.page.sleep([MemoryTag.KV_CACHE]), lambda held: bool(held.engine.status.asleep)),
        (lambda held, _: held.page.update_weight_version("b"), lambda held: held.engine.get_weight_version() == "b"),
        (
            lambda held, model: held.page.update_named_weights(update_from(model)),
            lambda held: held.engine.get_weight_version() == "pushed" and held.engine.state.value == "ready",
        ),
    ],
    ids=["load", "adapter", "pause", "sleep", "relabel", "update"],
)
async def test_a_call_that_ended_before_it_was_cancelled_is_seen(
    open_engine: OpenEngine, model: Path, tmp_path: Path, call: Call, begun: Begun
) -> None:
    async with held(open_engine, model, tmp_path) as both:
        await both.cancel(call(both, model), lambda: begun(both))
        assert both.seen(both.page) == both.seen(both.engine)


async def test_a_pause_that_is_cancelled_is_over(open_engine: OpenEngine, model: Path, tmp_path: Path) -> None:
    async with held(open_engine, model, tmp_path) as both:
        asking = asyncio.ensure_future(both.engine.generate([1, 2], LONG))
        await until(lambda: bool(both.engine.parts.in_flight.running))
        pausing = asyncio.ensure_future(both.page.pause_generation(PauseMode.WAIT))
        await until(lambda: both.page.is_paused)
        both.wire.hold_answers()
        pausing.cancel()
        await until(lambda: not both.engine.is_paused)
        assert both.page.is_paused
        assert not pausing.done()
        both.wire.let_answers_pass()
        async with within(seconds=BOUND):
            await asyncio.wait([pausing])
        assert pausing.cancelled()
        assert both.seen(both.page) == both.seen(both.engine)
        await both.engine.abort_generation()
        await asking


async def begin(page: InferenceEngine, model: Path) -> None:
    """Begin an update, which the caller cancels."""
    async with page.weight_update(update_from(model)):
        raise AssertionError("it was cancelled before it had begun")


@pytest.mark.parametrize("times", [1, 3])
async def test_an_update_whose_begin_is_cancelled_is_broken_off(
    open_engine: OpenEngine, model: Path, tmp_path: Path, times: int
) -> None:
    async with held(open_engine, model, tmp_path) as both:
        await both.cancel(begin(both.page, model), lambda: both.engine.state.value == "updating", times)
        assert both.page.state.value == both.engine.state.value == "dirty"
        await both.page.update_named_weights(update_from(model))
        assert both.page.state.value == "ready"
        assert (await both.page.generate([1, 2], GREEDY)).completions[0].weight_version == "pushed"


async def test_a_begin_that_is_known_long_after_it_was_cancelled_is_broken_off(
    open_engine: OpenEngine, model: Path, tmp_path: Path
) -> None:
    async with held(open_engine, model, tmp_path, close=0.2) as both:
        await give_up(both, begin(both.page, model), lambda: both.engine.state.value == "updating")
        assert both.engine.state.value == "updating"
        both.wire.let_answers_pass()
        await until(lambda: both.engine.state.value == "dirty")
        await both.page.update_named_weights(update_from(model))
        assert both.page.state.value == "ready"


async def test_a_preparation_that_was_given_up_does_not_drop_the_next(
    open_engine: OpenEngine, model: Path, tmp_path: Path
) -> None:
    async with held(open_engine, model, tmp_path, close=0.2) as both:
        updates = both.engine.parts.updates
        prepare = updates.prepare
        prepared: list[WeightUpdateRequest] = []

        async def noted(request: WeightUpdateRequest) -> None:
            await prepare(request)
            prepared.append(request)

        updates.prepare = noted  # type: ignore[method-assign]
        await give_up(both, both.page.prepare_weight_update(update_from(model)), lambda: len(prepared) == 1)
        again = asyncio.ensure_future(both.page.prepare_weight_update(update_from(model)))
        await until(lambda: len(prepared) == 2)
        both.wire.let_answers_pass()
        await again
        await owner_of(both.page).call("apply_update", None)
        assert both.engine.get_weight_version() == "pushed"


async def give_up(both: Held, call: Coroutine[object, object, object], begun: Callable[[], bool]) -> None:
    """Cancel a call once ``begun`` holds, and wait until it raises; what the owner says is held back throughout."""
    both.wire.hold_answers()
    task = asyncio.ensure_future(call)
    await until(begun)
    task.cancel()
    async with within(seconds=BOUND):
        await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("closes", [False, True], ids=["serves", "closes"])
async def test_an_update_that_is_applied_when_it_is_cancelled_ends_first(
    open_engine: OpenEngine, model: Path, tmp_path: Path, closes: bool
) -> None:
    async with held(open_engine, model, tmp_path, close=BOUND) as both:
        backend = both.engine.parts.backend
        apply, applies, may_apply = backend.apply_weights, asyncio.Event(), asyncio.Event()

        async def slow(update: ApplyUpdate) -> WeightReply:
            applies.set()
            await may_apply.wait()
            return await apply(update)

        backend.apply_weights = slow  # type: ignore[method-assign]
        updating = asyncio.ensure_future(both.page.update_named_weights(update_from(model)))
        await applies.wait()
        updating.cancel()
        # The answer to a later call comes after the end of a call that waits for nothing.
        await both.page.stats()
        assert not updating.done()
        if closes:  # which cuts holders off, and does not wait for the update
            async with within(seconds=BOUND):
                await both.engine.teardown()
        may_apply.set()
        async with within(seconds=BOUND):
            await asyncio.wait([updating])
        assert updating.cancelled()
        if not closes:
            assert both.engine.get_weight_version() == "pushed"
            assert both.seen(both.page) == both.seen(both.engine)


async def test_an_update_whose_preparation_is_cancelled_is_dropped(
    open_engine: OpenEngine, model: Path, tmp_path: Path
) -> None:
    async with held(open_engine, model, tmp_path) as both:
        asked = owner_of(both.page)
        prepared = asyncio.Event()
        updates = both.engine.parts.updates
        prepare = updates.prepare

        async def noted(request: WeightUpdateRequest) -> None:
            await prepare(request)
            prepared.set()

        updates.prepare = noted  # type: ignore[method-assign]
        await both.cancel(both.page.prepare_weight_update(update_from(model)), prepared.is_set)
        with pytest.raises(EngineStateError, match="no update was prepared"):
            await asked.call("apply_update", None)
        await both.page.update_named_weights(update_from(model))
        assert both.page.get_weight_version() == "pushed"


async def test_an_owner_that_says_nothing_holds_a_cancelled_call_for_a_bounded_time(
    open_engine: OpenEngine, model: Path, tmp_path: Path
) -> None:
    async with open_engine(timeouts={"heartbeat": 600, "close": 0.5}) as engine, wired(engine) as (wire, handle):
        page = await attach(handle)
        wire.hold_answers()
        pausing = asyncio.ensure_future(page.pause_generation(PauseMode.IN_PLACE))
        await until(lambda: engine.is_paused)
        pausing.cancel()
        async with within(seconds=BOUND):
            await asyncio.wait([pausing])
        assert pausing.cancelled()
        wire.let_answers_pass()
        await page.teardown()


@pytest.mark.parametrize("first", ["asleep", "updating"])
async def test_an_update_need_not_have_heard_that_the_engine_is_free(
    open_engine: OpenEngine, model: Path, tmp_path: Path, first: str
) -> None:
    async with held(open_engine, model, tmp_path) as both:
        if first == "asleep":
            await both.engine.sleep()
            await until(lambda: both.page.state.value == "asleep")
            both.wire.hold_answers()
            await both.engine.wake_up()
        else:
            with pytest.raises(WeightTransferFailed, match="ZeroDivisionError"):  # noqa: PT012
                async with both.engine.weight_update(update_from(model)):
                    await until(lambda: both.page.state.value == "updating")
                    both.wire.hold_answers()
                    raise ZeroDivisionError
        assert both.page.state.value == first
        updating = asyncio.ensure_future(both.page.update_named_weights(update_from(model)))
        await until(lambda: updating.done() or both.engine.get_weight_version() == "pushed")
        both.wire.let_answers_pass()
        await updating
        assert both.page.state.value == "ready"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_holder_that_put_memory_to_sleep_is_the_one_that_has_left_it_so(
    open_engine: OpenEngine, cancelled: bool
) -> None:
    async with open_engine(enable_sleep=True) as engine:
        one, other = [await attach(await engine.handle()) for _ in range(2)]
        backend = engine.parts.backend
        sleep, sleeps, may_sleep = backend.sleep, asyncio.Event(), asyncio.Event()

        async def slow(tags: frozenset[MemoryTag]) -> None:
            sleeps.set()
            await may_sleep.wait()
            await sleep(tags)

        backend.sleep = slow  # type: ignore[method-assign]
        first = asyncio.ensure_future(one.sleep([MemoryTag.KV_CACHE]))
        await sleeps.wait()
        second = asyncio.ensure_future(other.sleep([MemoryTag.KV_CACHE]))
        await other.stats()  # the second sleep has reached the owner
        if cancelled:
            second.cancel()
        may_sleep.set()
        await asyncio.gather(first, second, return_exceptions=True)
        await other.pause_generation(PauseMode.IN_PLACE)
        await other.teardown()
        await until(lambda: not engine.is_paused)  # the owner undoes the pause first
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert engine.status.describe() == "asleep (kv_cache)"
        await one.teardown()
        await until(lambda: "which is gone" in engine.status.describe())
        await engine.wake_up()
