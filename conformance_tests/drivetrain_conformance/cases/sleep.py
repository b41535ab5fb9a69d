"""Sleep: memory is really freed and taken back, and calls are refused or answered as the state says."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineBusy, EngineStateError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.calls_given_up import MOMENTS, given_up
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, counted_of, held_bytes, parameter_bytes
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_prefix, check_same
from drivetrain_conformance.assertions.weight_checks import check_made_by
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.holder_process import LIFTED_S, holder_of
from drivetrain_conformance.harness.testbench import (
    GREEDY_TOKENS,
    Bench,
    check_held,
    in_time,
    until_idle,
    until_running,
)
from drivetrain_conformance.harness.time_limits import result_of, within

_T = TypeVar("_T")

QUIET: Final = 0.1
"""Seconds during which nothing may happen."""
TOKENS: Final = 250
"""Length of a request that is in flight for a while and whose end the case awaits."""
MIB: Final = 2**20
ROOM: Final = MIB // 4
"""Bytes by which memory may grow in a cycle of sleep and wake-up: allocator overhead."""
MOST: Final = 0.9
"""Share of the memory reported by the engine that sleep must free."""
WRITTEN: Final = 0.7
"""The same share for a KV cache, parts of which may never have been written and so are not resident."""
NOISE: Final = MIB
"""Memory by which a measure may be off: an engine that keeps no cache between requests has none to give back."""
_AMPLE: Final = 3600.0
"""A timeout in seconds that no call reaches."""
_SHARED: Final = 200
_TOGETHER: Final = 16
"""Tokens of a prompt, and its samples, whose own cache is larger than that of the prompts before."""
WEIGHTS, KV_CACHE, CUDA_GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
SHORT: Final = SamplingParams(max_new_tokens=4, temperature=0)


# Calls in each state --------------------------------------------------------------------------------------------------


@case(Capability.SLEEP_KV_CACHE)
async def a_sleeping_engine_refuses_by_name(bench: Bench) -> None:
    """A sleeping engine refuses every request at once, naming state and remedy; once awake it answers as before."""
    engine = bench.engine
    prompts = bench.prompts(3)
    before = await bench.greedy(prompts)
    assert engine.status.asleep == frozenset()
    await engine.sleep([KV_CACHE])
    _check_asleep(engine, {KV_CACHE})
    await _requests_are_refused(bench, "asleep", "kv_cache")
    await engine.wake_up([KV_CACHE])
    _check_awake(engine)
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_KV_CACHE)
async def twice_is_as_once(bench: Bench) -> None:
    """Putting a sleeping engine to sleep, or waking one that is awake, changes nothing; tags may be given by name."""
    engine = bench.engine
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    await engine.wake_up([KV_CACHE])
    _check_awake(engine)
    check_same(bench, await bench.greedy(prompts), before)
    for again in ([KV_CACHE], ["kv_cache"], "kv_cache"):
        await engine.sleep(again)
        _check_asleep(engine, {KV_CACHE})
    for again in ([KV_CACHE], ["kv_cache"], KV_CACHE.value):
        await engine.wake_up(again)
        _check_awake(engine)
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_KV_CACHE)
async def wrong_tags_are_refused(bench: Bench) -> None:
    """An unknown tag and an empty list are refused, naming the argument; the engine stays in its state."""
    engine = bench.engine
    await _wrong_tags_are_refused(engine)
    _check_awake(engine)
    await engine.sleep([KV_CACHE])
    await _wrong_tags_are_refused(engine)
    _check_asleep(engine, {KV_CACHE})
    await engine.wake_up([KV_CACHE])
    await engine.generate(bench.prompt(), SHORT)


@case(Capability.SLEEP_WEIGHTS, changes_weights=True)
async def weights_that_slept_are_not_served(bench: Bench) -> None:
    """Weights that slept without being kept leave the engine dirty when they wake; only an update ends that."""
    engine = bench.engine
    await engine.sleep_weights_only()
    _check_asleep(engine, {WEIGHTS})
    await _requests_are_refused(bench, "asleep", "weights")
    await engine.sleep([WEIGHTS])
    await engine.wake_up_weights_only()
    await engine.wake_up([WEIGHTS])
    assert engine.state is EngineState.DIRTY
    assert engine.describe().state.startswith("dirty")
    assert engine.is_paused
    await _requests_are_refused(bench, "dirty", "weight")
    await _refused(engine.continue_generation(), "dirty")
    assert engine.state is EngineState.DIRTY


@case(Capability.SLEEP_WEIGHTS, Capability.WEIGHTS_DISK)
async def an_update_mends_weights_that_slept(bench: Bench) -> None:
    """After a committed update an engine whose weights slept and woke serves the updated weights."""
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(3)
    before = await bench.greedy(prompts)
    for folder, version in ((bench.other_weights(), "others"), (bench.model, own)):
        await engine.sleep([WEIGHTS])
        await engine.wake_up([WEIGHTS])
        await engine.load_weights_from_disk(str(folder), version)
        _check_awake(engine)
        assert not engine.is_paused
        assert engine.get_weight_version() == version
        after = await bench.greedy(prompts)
        check_made_by(bench, after, folder)
        if version == own:
            check_same(bench, after, before)
        else:
            assert [c.token_ids for c in after] != [c.token_ids for c in before], "other weights give the same answers"
        assert {completion.weight_version for completion in after} <= {version, None}
    for seconds in MOMENTS:
        await _sleep_is_given_up(bench, WEIGHTS, seconds)
        if engine.state is EngineState.DIRTY:
            await engine.load_weights_from_disk(str(bench.model), own)
        check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_WEIGHTS, Capability.WEIGHTS_DISK)
async def sleeping_weights_take_no_update(bench: Bench) -> None:
    """While the weights are asleep an update is refused, naming the state, and changes nothing."""
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(2)
    before = await bench.greedy(prompts)
    await engine.sleep([WEIGHTS])
    await _refused(engine.load_weights_from_disk(str(bench.other_weights()), "too early"), "asleep")
    _check_asleep(engine, {WEIGHTS})
    assert engine.get_weight_version() == own
    await engine.wake_up([WEIGHTS])
    assert engine.state is EngineState.DIRTY
    await engine.load_weights_from_disk(str(bench.model), own)
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK)
async def weights_can_change_while_the_cache_sleeps(bench: Bench) -> None:
    """An update is accepted while only the KV cache sleeps; once awake, the engine serves the new weights.

    They keep their version when the cache sleeps again.
    """
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(2)
    before = await bench.greedy(prompts)
    for folder, version in ((bench.other_weights(), "others"), (bench.model, own)):
        await engine.sleep([KV_CACHE])
        await engine.load_weights_from_disk(str(folder), version)
        _check_asleep(engine, {KV_CACHE})
        assert engine.get_weight_version() == version
        await _refused(engine.generate(prompts[0], SHORT), "asleep")
        await engine.wake_up([KV_CACHE])
        _check_awake(engine)
        after = await bench.greedy(prompts)
        _check_labels(bench, after, version)
        await engine.sleep([KV_CACHE])
        await engine.wake_up([KV_CACHE])
        again = await bench.greedy(prompts)
        _check_labels(bench, again, version)
        check_made_by(bench, [*after, *again], folder)
        if version == own:
            check_same(bench, after, before)
        else:
            assert [c.token_ids for c in after] != [c.token_ids for c in before], "other weights give the same answers"


@case(Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK)
async def a_training_step(bench: Bench) -> None:
    """Generate, sleep, wake the weights, update them, wake the cache, generate: twice, each time with new weights.

    Where the engine can, the second time is in a pause, from before the sleep until cached prefixes are discarded at
    its end. Nothing of that blocks the trainer's event loop.
    """
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, KV_CACHE, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(3)
    answers = [await bench.greedy(prompts)]
    folders = {seed: bench.other_weights(seed) for seed in (1, 2)}
    async with check_it_runs():
        for seed, folder in folders.items():
            in_a_pause = seed == 2 and bench.claims(Capability.PAUSE_WAIT)
            if in_a_pause:
                await engine.pause_generation(PauseMode.WAIT)
            await engine.sleep_all()
            assert engine.status.asleep >= {WEIGHTS, KV_CACHE}
            await engine.wake_up([WEIGHTS])
            await engine.load_weights_from_disk(str(folder), f"step-{seed}")
            assert engine.state is EngineState.ASLEEP
            await engine.wake_up_all()
            if in_a_pause:
                if bench.claims(Capability.PREFIX_CACHE):
                    await engine.reset_prefix_cache()
                assert engine.is_paused, "a sleep, an update or a wake-up ended the pause"
                await engine.continue_generation()
            _check_awake(engine)
            answers.append(await bench.greedy(prompts))
            _check_labels(bench, answers[-1], f"step-{seed}")
            check_made_by(bench, answers[-1], folder)
            assert [c.token_ids for c in answers[-1]] != [c.token_ids for c in answers[-2]]
    await engine.load_weights_from_disk(str(bench.model), own)
    check_same(bench, await bench.greedy(prompts), answers[0])


# Orders ---------------------------------------------------------------------------------------------------------------


@case(Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK)
async def any_order_of_tags(bench: Bench) -> None:
    """Memory can sleep and wake one kind at a time, in any order, or together; nothing is served until all is back.

    No prefix that was cached before is found afterwards.
    """
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, KV_CACHE, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(2, 100)
    before = await _answers(bench, prompts)
    for asleep, awake in _orders(bench):
        await _in_steps(bench, asleep, awake)
        assert engine.state is EngineState.DIRTY
        await _refused(engine.generate(prompts[0], SHORT), "dirty")
        await engine.load_weights_from_disk(str(bench.model), own)
        _check_awake(engine)
        after = await _answers(bench, prompts)
        cached = [completion.cached_tokens for completion in after]
        assert not any(cached), f"{cached} tokens were found in a cache that had slept"
        check_same(bench, after, before)


@case(
    Capability.SLEEP_KEEPS_WEIGHTS,
    Capability.SLEEP_WEIGHTS,
    Capability.SLEEP_KV_CACHE,
    config={"sleep_keeps_weights": True},
)
async def any_order_of_tags_with_weights_kept(bench: Bench) -> None:
    """With kept weights, any order of sleep and wake ends in an engine that answers as before."""
    await _can_sleep(bench, WEIGHTS, KV_CACHE)
    prompts = bench.prompts(2)
    before = await _answers(bench, prompts)
    for asleep, awake in _orders(bench):
        await _in_steps(bench, asleep, awake)
        _check_awake(bench.engine)
        check_same(bench, await _answers(bench, prompts), before)


@case(Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK)
async def half_awake_can_sleep_again(bench: Bench) -> None:
    """An engine that is partly awake can sleep again, and then wake as a whole."""
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, KV_CACHE, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(2)
    before = await bench.greedy(prompts)
    for first in (WEIGHTS, KV_CACHE):
        await engine.sleep([WEIGHTS, KV_CACHE])
        asleep = await engine.stats()
        await engine.wake_up([first])
        _check_asleep(engine, {WEIGHTS, KV_CACHE} - {first})
        half = await engine.stats()
        assert first is WEIGHTS or half.weight_bytes <= asleep.weight_bytes, (
            f"the cache woke, and {half.weight_bytes} bytes of weights with it"
        )
        await engine.sleep([WEIGHTS, KV_CACHE])
        _check_asleep(engine, {WEIGHTS, KV_CACHE})
        await engine.wake_up([WEIGHTS, KV_CACHE])
        await engine.load_weights_from_disk(str(bench.model), own)
        check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_KEEPS_WEIGHTS, Capability.SLEEP_WEIGHTS, config={"sleep_keeps_weights": True})
async def kept_weights_come_back_as_they_were(bench: Bench) -> None:
    """Kept weights need no update after they wake: answers and version are as before.

    The weights that come back are those of the last update before the sleep, not of an earlier one.
    """
    engine = bench.engine
    own, prompts = engine.get_weight_version(), bench.prompts(4)
    served, version = bench.model, own
    for cycle in range(max(3, bench.profile.cycles // 5)):
        if cycle and bench.claims(Capability.WEIGHTS_DISK):
            served, version = ((bench.model, own), (bench.other_weights(), "others"))[cycle % 2]
            await engine.load_weights_from_disk(str(served), version)
        before = await bench.greedy(prompts)
        await engine.sleep_weights_only()
        _check_asleep(engine, {WEIGHTS})
        await _refused(engine.generate(prompts[0], SHORT), "asleep")
        await engine.wake_up_weights_only()
        _check_awake(engine)
        assert engine.get_weight_version() == version
        check_same(bench, await bench.greedy(prompts), before, model=served)
    if version != own:
        await engine.load_weights_from_disk(str(bench.model), own)


# Requests in flight ---------------------------------------------------------------------------------------------------


@case(Capability.SLEEP_KV_CACHE, Capability.ABORT)
async def requests_in_flight_are_not_sleeps_to_decide(bench: Bench) -> None:
    """sleep() with requests in flight is refused and leaves them alone, unless its arguments say to abort them."""
    engine = bench.engine
    await engine.abort("an id that no request has")
    await _can_sleep(bench, KV_CACHE)
    prompts, params = bench.prompts(2), bench.long(TOKENS)
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params, tokens=0) as task:
        with in_time(task):
            await _busy(engine.sleep([KV_CACHE]))
            await _busy(engine.sleep([KV_CACHE], drain_timeout=0.02))
        _check_awake(engine)
        check_same(bench, (await result_of(task)).completions, whole)
    async with bench.in_flight(prompts, params) as task:
        await engine.sleep([KV_CACHE], abort_first=True)
        _check_asleep(engine, {KV_CACHE})
        for part, complete in zip((await result_of(task)).completions, whole, strict=True):
            with in_time(part):
                assert part.finish_reason is FinishReason.ABORT
            assert 0 < len(part.token_ids) < len(complete.token_ids)
            check_prefix(bench, part, complete)
        await engine.wake_up([KV_CACHE])
    check_same(bench, (await engine.generate(prompts, params)).completions, whole)


@case(Capability.SLEEP_KV_CACHE, Capability.ABORT)
async def all_samples_are_aborted_before_sleep(bench: Bench) -> None:
    """sleep(abort_first=True) ends every sample of a prompt; once awake the engine is idle and serves."""
    engine = bench.engine
    await engine.abort("an id that no request has")
    await _can_sleep(bench, KV_CACHE)
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    async with bench.in_flight(prompts, bench.long(n=4)) as task:
        await engine.sleep([KV_CACHE], abort_first=True)
        samples = (await result_of(task)).completions
        with in_time(*samples):
            assert [sample.finish_reason for sample in samples] == [FinishReason.ABORT] * 8
        await engine.wake_up([KV_CACHE])
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_KV_CACHE)
async def sleep_can_let_requests_end_first(bench: Bench) -> None:
    """With a drain timeout requests in flight end before sleep; one that arrives meanwhile is answered or refused."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    prompts, params = bench.prompts(3), bench.long(60)
    whole = (await engine.generate(prompts, params)).completions
    task = await until_running(engine, 2, lambda: engine.generate(prompts[:2], params))
    sleeping = asyncio.create_task(engine.sleep([KV_CACHE], drain_timeout=_AMPLE))
    await asyncio.sleep(0)
    late = asyncio.create_task(_answer_or_refusal(engine, prompts[2], params))
    await result_of(sleeping)
    _check_asleep(engine, {KV_CACHE})
    check_same(bench, (await result_of(task)).completions, whole[:2])
    await engine.wake_up([KV_CACHE])
    answer = await result_of(late)
    if answer is not None:
        check_same(bench, [answer], whole[2:])


@case(Capability.SLEEP_KV_CACHE, Capability.PAUSE_RETRACT)
async def retracted_requests_survive_a_sleep_of_the_cache(bench: Bench) -> None:
    """Retracted requests hold no cache: they stay frozen while it sleeps, and then continue with the same tokens."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    await _can_sleep_paused(engine, PauseMode.RETRACT)
    prompts, params = bench.prompts(2), bench.long(TOKENS)
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(PauseMode.RETRACT)
        await check_held(engine, task)
        await engine.sleep([KV_CACHE])
        _check_asleep(engine, {KV_CACHE})
        await asyncio.sleep(QUIET)
        await engine.wake_up([KV_CACHE])
        assert engine.state is EngineState.PAUSED
        await asyncio.sleep(QUIET)
        assert not task.done()
        await engine.continue_generation()
        check_same(bench, (await result_of(task)).completions, whole)


@case(Capability.SLEEP_KV_CACHE, Capability.PAUSE_IN_PLACE)
async def requests_frozen_in_place_keep_the_cache_awake(bench: Bench) -> None:
    """Requests frozen in place hold cache: sleep is refused, and they continue as if never paused."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    await _can_sleep_paused(engine, PauseMode.IN_PLACE)
    prompts, params = bench.prompts(2), bench.long(TOKENS)
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(PauseMode.IN_PLACE)
        await check_held(engine, task)
        await _busy(engine.sleep([KV_CACHE]))
        assert engine.state is EngineState.PAUSED
        assert engine.status.asleep == frozenset()
        await engine.continue_generation()
        check_same(bench, (await result_of(task)).completions, whole)


@case(Capability.SLEEP_KV_CACHE, Capability.PAUSE_WAIT)
async def arrivals_of_a_pause_wait_through_a_sleep(bench: Bench) -> None:
    """Requests that arrive during a pause wait through sleep and wake-up, and are served after the pause."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    prompts = bench.prompts(3)
    before = await bench.greedy(prompts)
    await engine.pause_generation(PauseMode.WAIT)
    async with _waiting(bench, prompts[0]) as early:
        await engine.sleep([KV_CACHE])
        _check_asleep(engine, {KV_CACHE})
        async with _waiting(bench, prompts[1]) as asleep:
            await engine.wake_up([KV_CACHE])
            assert engine.state is EngineState.PAUSED, "waking does not end a pause"
            async with _waiting(bench, prompts[2]) as late:
                assert not early.done()
                assert not asleep.done()
                await engine.continue_generation()
                answers = [(await result_of(task))[0] for task in (early, asleep, late)]
    _check_awake(engine)
    check_same(bench, answers, before)


@case(Capability.SLEEP_WEIGHTS, Capability.PAUSE_WAIT, Capability.WEIGHTS_DISK)
async def arrivals_of_a_pause_are_served_by_the_new_weights(bench: Bench) -> None:
    """A request that arrives while a paused engine's weights sleep is answered by the next update's weights.

    So is one that arrives while the weights are awake and the cache still sleeps.
    """
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, update=True)
    own, (prompt,) = engine.get_weight_version(), bench.prompts(1)
    others = bench.other_weights()
    await engine.load_weights_from_disk(str(others), "others")
    expected = await bench.greedy([prompt])
    await engine.load_weights_from_disk(str(bench.model), own)
    await engine.pause_generation(PauseMode.WAIT)
    tags = [WEIGHTS, *([KV_CACHE] if bench.claims(Capability.SLEEP_KV_CACHE) else [])]
    await engine.sleep(tags)
    async with _waiting(bench, prompt) as asleep:
        await engine.wake_up([WEIGHTS])
        await _refused(engine.continue_generation(), "asleep" if KV_CACHE in tags else "dirty")
        async with _waiting(bench, prompt) as half_awake:
            await engine.load_weights_from_disk(str(others), "others")
            await engine.wake_up_all()
            await asyncio.sleep(QUIET)
            assert not asleep.done(), "an update does not end a pause"
            assert not half_awake.done(), "waking does not end a pause"
            await engine.continue_generation()
            for task in (asleep, half_awake):
                check_same(bench, await result_of(task), expected, model=others)
    await engine.load_weights_from_disk(str(bench.model), own)


@case(Capability.SLEEP_KV_CACHE)
async def a_caller_that_went_away_does_not_disturb_a_sleep(bench: Bench) -> None:
    """Requests whose call was just cancelled do not keep the engine from sleeping or serving."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    for seconds in (0.0, 0.001, 0.003, 0.01, 0.02, 0.05):
        task = asyncio.create_task(engine.generate(prompts, bench.long()))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait([task])
        await engine.sleep([KV_CACHE], drain_timeout=_AMPLE)
        await engine.wake_up([KV_CACHE])
        check_same(bench, await bench.greedy(prompts), before)
    for after in MOMENTS:
        await _sleep_is_given_up(bench, KV_CACHE, after)
        check_same(bench, await bench.greedy(prompts), before)


async def _sleep_is_given_up(bench: Bench, tag: MemoryTag, after: float) -> None:
    """Let the callers of a sleep and of the wake-up leave, each after some seconds; return once the engine is awake.

    The engine's state must say what they did.
    """
    engine = bench.engine
    await given_up(engine.sleep([tag]), after)
    if engine.status.asleep:
        await _requests_are_refused(bench, "asleep", tag.value)
        await given_up(engine.wake_up([tag]), after)
    if engine.status.asleep:
        await engine.wake_up([tag])


@case(Capability.SLEEP_KV_CACHE)
async def many_callers_at_once(bench: Bench) -> None:
    """Concurrent callers that sleep, wake and generate neither hang nor do harm: each is answered or refused."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    prompts = bench.prompts(4)
    whole = await bench.greedy(prompts)
    for _ in range(4):
        tasks = [
            asyncio.create_task(_answer_or_refusal(engine, prompt, bench.long(len(whole[index].token_ids))))
            for index, prompt in enumerate(prompts)
        ]
        callers = [
            asyncio.create_task(_or_busy(engine.wake_up([KV_CACHE]) if turn % 2 else engine.sleep([KV_CACHE])))
            for turn in range(6)
        ]
        for caller in callers:
            await result_of(caller)
        await engine.wake_up([KV_CACHE])
        for task, complete in zip(tasks, whole, strict=True):
            answer = await result_of(task)
            if answer is not None:
                check_prefix(bench, answer, complete)
        _check_awake(engine)
        check_same(bench, await bench.greedy(prompts), whole)
    await _sleeps_on_without_its_holder(bench)
    check_same(bench, await bench.greedy(prompts), whole)


async def _sleeps_on_without_its_holder(bench: Bench) -> None:
    """Let a holder in another process put the engine to sleep, and kill it; then wake the engine up.

    Its memory may be in use by others, so it sleeps on, and its refusals say that the holder is gone. A pause that it
    shared with others goes on.
    """
    engine = bench.engine
    shared = PauseMode.ABORT if bench.claims(Capability.PAUSE_ABORT) else None
    async with holder_of(engine) as holder:
        if shared is not None:
            await engine.pause_generation(shared)
            await holder.pause(shared)
        await holder.sleep([KV_CACHE])
        holder.kill()
        async with within("word of a holder that was killed after it put the engine to sleep", LIFTED_S):
            while "gone" not in engine.describe().state:  # noqa: ASYNC110 - the engine may be another process's
                await asyncio.sleep(0.005)
    if shared is not None:
        assert engine.is_paused, "a holder that was killed ended a pause that it shared"
        await engine.continue_generation()
    _check_asleep(engine, {KV_CACHE})
    await _requests_are_refused(bench, "asleep", "gone")
    await engine.sleep([KV_CACHE])
    state = engine.describe().state
    assert "gone" not in state, f"this holder has put it to sleep too, and it is {state}"
    await engine.wake_up([KV_CACHE])
    _check_awake(engine)


# Memory ---------------------------------------------------------------------------------------------------------------


@case(Capability.SLEEP_WEIGHTS, model=ModelKind.LARGE, changes_weights=True, slow=True)
async def the_memory_of_weights_comes_back(bench: Bench) -> None:
    """Sleep frees most of the weights' memory, as the operating system or driver counts it."""
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS)
    size, matrix = parameter_bytes(engine), _smallest_matrix(bench)
    if bench.claims(Capability.SLEEP_KV_CACHE):  # so that memory freed earlier is given back now, not with the weights
        await engine.sleep([KV_CACHE])
        await engine.wake_up([KV_CACHE])
    awake, stats = held_bytes(engine), await engine.stats()
    await engine.sleep([WEIGHTS])
    given_back, asleep = awake - held_bytes(engine), await engine.stats()
    await engine.wake_up([WEIGHTS])
    # A GPU's memory comes in blocks that are larger than a matrix.
    least = MOST * size if engine.model_info.device.startswith("cuda") else stats.weight_bytes - matrix * 3 // 4
    assert MOST * size <= stats.weight_bytes <= size / MOST, (
        f"awake, the engine says that it holds {stats.weight_bytes} bytes of {size}"
    )
    assert given_back >= least, (
        f"{given_back / MIB:.2f} MiB came back, of {size / MIB:.2f} MiB of parameters ({held_bytes(engine) / MIB:.0f} "
        f"MiB are held), the smallest matrix of which has {matrix / MIB:.2f} MiB"
    )
    assert asleep.weight_bytes < matrix, f"asleep, it says that it holds {asleep.weight_bytes} bytes"


def _smallest_matrix(bench: Bench) -> int:
    """Return the bytes of the smallest matrix of the model's folder, in the engine's dtype."""
    dtype: torch.dtype = getattr(torch, bench.engine.model_info.dtype)
    return dtype.itemsize * min(one.numel() for one in tensors_of(bench.model).values() if one.ndim > 1)


@case(Capability.SLEEP_KV_CACHE, model=ModelKind.LARGE, slow=True)
async def the_memory_of_the_cache_comes_back(bench: Bench) -> None:
    """Sleep frees most of the KV cache's memory, as the operating system or driver counts it.

    A pause frees none. Waking all memory leaves the weights, which did not sleep, as they are.
    """
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    await _fill_cache(bench)
    # A cached prompt is kept once, so the samples that ran together now hold most of the memory.
    await engine.generate(bench.prompt(_SHARED), SHORT.model_copy(update={"n": _TOGETHER}))
    size = (await engine.stats()).kv_cache_bytes
    # An engine may keep no cache between requests, but then it must not claim a prefix cache.
    keeps = bench.claims(Capability.PREFIX_CACHE) or size > 0
    assert size > 8 * MIB or not keeps, f"after a long prompt the engine says that its cache holds {size} bytes"
    prompt, weights = bench.prompt(), (await engine.stats()).weight_bytes
    before = await bench.greedy([prompt])
    await until_idle(engine)  # it may free a request's memory after its answer
    awake = held_bytes(engine)
    if bench.claims(Capability.PAUSE_IN_PLACE):
        await engine.pause_generation(PauseMode.IN_PLACE)
        missing = awake - held_bytes(engine)
        await engine.continue_generation()
        assert missing <= size / 4 + NOISE, f"a pause gave {missing / MIB:.0f} MiB back"
    await engine.sleep([KV_CACHE])
    given_back, left = awake - held_bytes(engine), (await engine.stats()).kv_cache_bytes
    await engine.wake_up_all()
    assert given_back >= WRITTEN * size - NOISE, f"{given_back / MIB:.0f} MiB came back, of {size / MIB:.0f} of cache"
    assert left <= (1 - MOST) * size, f"asleep, the engine says that its cache holds {left} bytes"
    now = (await engine.stats()).weight_bytes
    assert now == weights, f"the cache woke, and {now} bytes of weights are held in place of {weights}"
    check_same(bench, await bench.greedy([prompt]), before)


@case(Capability.SLEEP_CUDA_GRAPH, hardware=Hardware.GPU)
async def the_memory_of_cuda_graphs_comes_back(bench: Bench) -> None:
    """CUDA graphs can sleep and wake: their memory is freed, nothing is served meanwhile, and answers are unchanged."""
    engine = bench.engine
    prompts = bench.prompts(3)
    before = await bench.greedy(prompts)
    awake = held_bytes(engine)
    await engine.sleep([CUDA_GRAPH])
    _check_asleep(engine, {CUDA_GRAPH})
    asleep = held_bytes(engine)
    await _requests_are_refused(bench, "asleep", "cuda_graph")
    await engine.wake_up([CUDA_GRAPH])
    _check_awake(engine)
    assert asleep < awake, "no memory came back"
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK, model=ModelKind.LARGE, slow=True)
async def memory_is_taken_again_step_by_step(bench: Bench) -> None:
    """Waking the weights takes only their memory, not the cache's; after an update the engine is as before.

    The cache takes its memory when it wakes and is filled.
    """
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, KV_CACHE, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(2)
    before = await bench.greedy(prompts, 4)
    await _fill_cache(bench)
    size, cache = parameter_bytes(engine), (await engine.stats()).kv_cache_bytes
    awake = asleep = half_awake = 0
    for _ in range(2):  # only the second cycle counts: what earlier cases left in the heap is given back in the first
        awake = held_bytes(engine)
        await engine.sleep([WEIGHTS, KV_CACHE])
        asleep = held_bytes(engine)
        await engine.wake_up([WEIGHTS])
        # Memory that was never written may not be resident, so measure after the update has filled it.
        await engine.load_weights_from_disk(str(bench.model), own)
        half_awake = held_bytes(engine)
        await engine.wake_up([KV_CACHE])
        await _fill_cache(bench)
    taken = held_bytes(engine) - half_awake
    check_same(bench, await bench.greedy(prompts, 4), before)
    assert taken >= cache / 2 - NOISE, f"the cache woke, and took {taken / MIB:.0f} MiB of {cache / MIB:.0f}"
    assert awake - asleep >= MOST * size + WRITTEN * cache
    assert half_awake - asleep >= MOST * size, "the weights woke, and took no memory"
    assert half_awake <= awake - cache / 2 + NOISE, "only the weights woke, but the cache's memory is taken as well"


@case(
    Capability.SLEEP_KEEPS_WEIGHTS,
    Capability.SLEEP_WEIGHTS,
    model=ModelKind.LARGE,
    hardware=Hardware.GPU,
    config={"sleep_keeps_weights": True},
)
async def kept_weights_give_their_memory_back_too(bench: Bench) -> None:
    """Kept weights leave the GPU when they sleep, and return to it when they wake."""
    engine = bench.engine
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts, 4)
    size, awake = parameter_bytes(engine), held_bytes(engine)
    await engine.sleep([WEIGHTS])
    asleep = held_bytes(engine)
    await engine.wake_up([WEIGHTS])
    assert awake - asleep >= MOST * size
    assert held_bytes(engine) - asleep >= MOST * size
    check_same(bench, await bench.greedy(prompts, 4), before)


@case(Capability.SLEEP_KV_CACHE, slow=True)
async def many_cycles_of_the_cache_hold_no_more_memory(bench: Bench) -> None:
    """In repeated sleep cycles of the KV cache the answers stay the same, and memory does not grow."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    prompts = bench.prompts(3)
    before = await bench.greedy(prompts)

    async def cycle(is_looked_at: bool) -> int:
        await engine.sleep([KV_CACHE])
        held = held_bytes(engine) if is_looked_at else 0
        await engine.wake_up([KV_CACHE])
        check_same(bench, await bench.greedy(prompts), before)
        return held

    await _check_cycles(bench, cycle)


@case(Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK, slow=True)
async def many_cycles_give_the_same_answers(bench: Bench) -> None:
    """In repeated cycles of sleep, wake-up and update the answers stay the same, and memory does not grow.

    Each sleep frees what the engine says that it holds.
    """
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, KV_CACHE, update=True)
    own, prompts = engine.get_weight_version(), bench.prompts(3)
    before = await _answers(bench, prompts)

    async def cycle(is_looked_at: bool) -> int:
        awake = await engine.stats()
        await engine.sleep([WEIGHTS, KV_CACHE])
        held, asleep = held_bytes(engine) if is_looked_at else 0, await engine.stats()
        assert asleep.weight_bytes <= (1 - MOST) * awake.weight_bytes, f"asleep, it holds {asleep.weight_bytes} bytes"
        assert asleep.kv_cache_bytes <= (1 - MOST) * awake.kv_cache_bytes, f"its cache holds {asleep.kv_cache_bytes}"
        await engine.wake_up([WEIGHTS])
        await engine.load_weights_from_disk(str(bench.model), own)
        await engine.wake_up([KV_CACHE])
        check_same(bench, await _answers(bench, prompts), before)
        return held

    await _check_cycles(bench, cycle)


@case(Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.WEIGHTS_DISK, model=ModelKind.LARGE, slow=True)
async def cycles_of_a_large_model_hold_no_more_memory(bench: Bench) -> None:
    """Repeated cycles of sleep, wake-up and update leak no part of a large model's weights."""
    engine = bench.engine
    await _can_sleep(bench, WEIGHTS, KV_CACHE, update=True)
    own, cycles = engine.get_weight_version(), max(4, bench.profile.cycles // 12)
    asleep: list[int] = []
    awake: list[int] = []
    for _ in range(cycles):
        await engine.sleep([WEIGHTS, KV_CACHE])
        asleep.append(held_bytes(engine))
        await engine.wake_up([WEIGHTS])
        await engine.load_weights_from_disk(str(bench.model), own)
        await engine.wake_up([KV_CACHE])
        awake.append(held_bytes(engine))
    room = parameter_bytes(engine) // 10
    _check_no_growth(asleep, room)
    _check_no_growth(awake, room)


# Caches and logprobs --------------------------------------------------------------------------------------------------


@case(Capability.SLEEP_KV_CACHE, Capability.PREFIX_CACHE)
async def no_prefix_is_found_after_a_sleep(bench: Bench) -> None:
    """After the KV cache slept no prompt is found in it; prefixes cached afterwards are correct and counted."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    await engine.reset_prefix_cache()
    prompt = bench.prompt(300)
    (cold,) = await bench.greedy([prompt])
    (warm,) = await bench.greedy([prompt])
    assert warm.cached_tokens > 0
    await engine.sleep([KV_CACHE])
    await engine.wake_up([KV_CACHE])
    (after,) = await bench.greedy([prompt])
    (again,) = await bench.greedy([prompt])
    assert after.cached_tokens == 0, "a prefix was found in memory that had been given back"
    assert again.cached_tokens > 0
    check_same(bench, [warm, after, again], [cold] * 3)
    await _check_prefixes_are_counted(bench)


async def _check_prefixes_are_counted(bench: Bench) -> None:
    """Check that stats() reports at least a quarter of what cached prompts take: a cache may hold 8 bits a number."""
    engine, prompts, found = bench.engine, bench.prompts(10, 300), 0
    for prompt in prompts:  # one by one, so that the running requests' own memory stays small
        await bench.greedy([prompt], 1)
    for prompt in prompts:
        (again,) = await bench.greedy([prompt], 1)
        found += again.cached_tokens
    least, held = found * _bytes_per_token(bench) // 4, (await engine.stats()).kv_cache_bytes
    assert held >= least, f"it holds {found} tokens of prompts, at least {least} bytes, and reports {held} of KV cache"


def _bytes_per_token(bench: Bench) -> int:
    """Return the size of one token's keys and values in the engine's dtype; 0 if the model keeps something else."""
    config = json.loads((bench.model / "config.json").read_text(encoding="utf-8"))
    whole = set(config.get("layer_types") or ()) <= {"full_attention"} and "kv_lora_rank" not in config
    if not whole or "num_key_value_heads" not in config:
        return 0
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    itemsize = 4 if bench.engine.model_info.dtype == "float32" else 2
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size * itemsize)


@case(Capability.SLEEP_KV_CACHE, Capability.LOGPROBS_RAW)
async def logprobs_are_the_same_after_a_sleep(bench: Bench) -> None:
    """Every request after waking has the same logprobs as before."""
    engine = bench.engine
    await _can_sleep(bench, KV_CACHE)
    params = SamplingParams(max_new_tokens=12, temperature=0, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    prompts = bench.prompts(3, 20)
    before = (await engine.generate(prompts, params)).completions
    for _ in range(3):
        await engine.sleep([KV_CACHE])
        await engine.wake_up([KV_CACHE])
        after = (await engine.generate(prompts, params)).completions
        check_same(bench, after, before)
        for one, other in zip(after, before, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            if one.token_ids == other.token_ids:
                worst = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
                assert worst <= bench.tolerance(), f"a logprob is off by {worst:.3g} nats"


# ----------------------------------------------------------------------------------------------------------------------


def _check_asleep(engine: InferenceEngine, tags: Iterable[MemoryTag]) -> None:
    assert engine.state is EngineState.ASLEEP
    assert engine.status.asleep == frozenset(tags)
    assert all(tag.value in engine.describe().state for tag in tags)


def _check_labels(bench: Bench, completions: Iterable[Completion], version: str) -> None:
    """Check that completions are of a version alone, where the engine says which."""
    if bench.claims(Capability.VERSION_SPANS):
        found = sorted({span.version for completion in completions for span in completion.weight_versions})
        assert found == [version], f"the engine serves {version!r}, and its completions are labelled {found}"


def _check_awake(engine: InferenceEngine) -> None:
    assert engine.state is EngineState.READY
    assert engine.status.asleep == frozenset()
    assert engine.describe().state == "ready"


async def _answers(bench: Bench, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Return greedy completions, with raw logprobs if the engine has them: :func:`check_same` compares these, too."""
    params = SamplingParams(max_new_tokens=GREEDY_TOKENS, temperature=0)
    if bench.claims(Capability.LOGPROBS_RAW):
        params = params.model_copy(update={"logprobs": 0, "logprobs_mode": LogprobsMode.RAW})
    return (await bench.engine.generate([list(prompt) for prompt in prompts], params)).completions


async def _can_sleep(bench: Bench, *tags: MemoryTag, update: bool = False) -> None:
    """Use all capabilities of the case without effect, so that an engine lacking one refuses before any change."""
    await bench.engine.wake_up(tags)
    if update:
        await bench.engine.load_weights_from_disk(str(bench.model), bench.engine.get_weight_version())


async def _can_sleep_paused(engine: InferenceEngine, mode: PauseMode) -> None:
    """Let the cache sleep in a pause, without requests, so that an engine lacking either refuses before any change."""
    await engine.pause_generation(mode)
    await engine.sleep([KV_CACHE])
    await engine.wake_up([KV_CACHE])
    await engine.continue_generation()


async def _refused(asked: Coroutine[object, object, object], state: str, mentions: str = "") -> None:
    """Require a call to be refused in time, naming the engine's state."""
    done = f"an engine that is {state} did what it was asked to do"
    with refused(EngineStateError, state=state, naming=mentions, otherwise=done):
        async with within():
            await asked


async def _requests_are_refused(bench: Bench, state: str, mentions: str) -> None:
    """Require requests of every kind that the engine serves to be refused."""
    engine, prompt = bench.engine, bench.prompt()
    await _refused(engine.generate(prompt, SHORT), state, mentions)
    await _refused(engine.generate([prompt, prompt], SamplingParams(n=2, max_new_tokens=1)), state, mentions)
    if bench.claims(Capability.STREAMING):
        await _refused(anext(engine.generate_stream(prompt, SHORT)), state, mentions)
    if bench.claims(Capability.SCORE_TOKENS) and bench.claims(Capability.PROMPT_LOGPROBS):
        await _refused(engine.compute_logprobs([prompt]), state, mentions)


async def _busy(sleeping: Coroutine[object, object, None]) -> None:
    with refused(EngineBusy, naming="abort_first", otherwise="the engine fell asleep, though requests were in flight"):
        async with within():
            await sleeping


async def _or_busy(change: Coroutine[object, object, None]) -> None:
    with suppress(EngineBusy):
        await change


async def _answer_or_refusal(
    engine: InferenceEngine, prompt: Sequence[int], params: SamplingParams
) -> Completion | None:
    try:
        return (await engine.generate(list(prompt), params)).completions[0]
    except EngineStateError as error:
        if error.state != "asleep":
            raise
        return None


async def _wrong_tags_are_refused(engine: InferenceEngine) -> None:
    wrong_tags: list[list[MemoryTag | str] | str] = [[KV_CACHE, "dreams"], "dreams", []]
    for change in (engine.sleep, engine.wake_up):
        for tags in wrong_tags:
            wrong = "dreams" if tags else "empty"
            with refused(InvalidRequest, field="tags", naming=wrong, otherwise=f"tags={tags!r} was taken"):
                await change(tags)


@asynccontextmanager
async def _waiting(bench: Bench, prompt: Sequence[int]) -> AsyncGenerator[asyncio.Task[list[Completion]], None]:
    """Send a request and require it to wait."""
    task = asyncio.create_task(bench.greedy([prompt]))
    try:
        await asyncio.sleep(QUIET)
        if task.done():
            raise AssertionError(f"a request that arrived did not wait: {task.exception() or task.result()}")
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


Steps = tuple[frozenset[MemoryTag], ...]


def _orders(bench: Bench) -> list[tuple[Steps, Steps]]:
    """Return at most 12 pairs of step orders, in which to sleep and to wake."""
    tags = [WEIGHTS, KV_CACHE]
    if bench.claims(Capability.SLEEP_CUDA_GRAPH):
        tags.append(CUDA_GRAPH)
    one_by_one: list[Steps] = [tuple(frozenset({tag}) for tag in order) for order in itertools.permutations(tags)]
    steps: list[Steps] = [*one_by_one, (frozenset(tags),)]
    pairs = list(itertools.product(steps, steps))
    return bench.rng.sample(pairs, min(12, len(pairs)))


async def _in_steps(bench: Bench, falling_asleep: Steps, waking: Steps) -> None:
    engine = bench.engine
    asleep: frozenset[MemoryTag] = frozenset()
    for tags in falling_asleep:
        await engine.sleep(tags)
        asleep |= tags
        _check_asleep(engine, asleep)
        await _refused(engine.generate(bench.prompt(), SHORT), "asleep")
    for tags in waking:
        _check_asleep(engine, asleep)
        await _refused(engine.generate(bench.prompt(), SHORT), "asleep")
        await engine.wake_up(tags)
        asleep -= tags
    assert engine.status.asleep == frozenset()


async def _fill_cache(bench: Bench) -> None:
    """Make the KV cache hold something, even on an engine that allocates it on demand."""
    on_gpu = bench.engine.model_info.device.startswith("cuda")
    length = min(900, bench.engine.model_info.context_length - 1)
    params = SamplingParams(max_new_tokens=1, temperature=0)
    await bench.engine.generate(bench.prompts(8 if on_gpu else 1, length), params)


async def _check_cycles(bench: Bench, cycle: Callable[[bool], Awaitable[int]]) -> None:
    """Run ``profile.cycles`` cycles, and raise if memory that is held asleep grows steadily.

    ``cycle(True)`` returns the bytes that are held asleep. ``cycle(False)`` does not measure, which saves time.
    """
    count = max(1, bench.profile.cycles // 7)

    async def held_after_some() -> dict[str, int]:
        for _ in range(count - 1):
            await cycle(False)
        return {"bytes of memory": await cycle(True), **counted_of(bench.engine)}

    await held_after_some()  # the first round fills caches
    await check_steady(held_after_some, {"bytes of memory": count * ROOM, **COUNTED}, f"{count} cycles of sleep")


def _check_no_growth(held: Sequence[int], room: int) -> None:
    """Compare with the second measurement, as caches fill until then."""
    begin, end = held[1], min(held[-2:])
    assert end - begin <= room, (
        f"{(end - begin) / MIB:.0f} MiB more were held in the end: "
        f"{', '.join(f'{bytes_ / MIB:.0f}' for bytes_ in held)} MiB, one after another"
    )
