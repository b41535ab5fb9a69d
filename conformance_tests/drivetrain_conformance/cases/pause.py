"""The pause table: requests in flight and arriving requests, for each mode, before and after continuing."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import DeadlineExceeded, EngineStateError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, CompletionChunk, FinishReason, GenerationOutput
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.calls_given_up import MOMENTS, given_up
from drivetrain_conformance.assertions.lasting_state import every_logprob, with_a_state
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_prefix, check_same
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.holder_process import LIFTED_S, holder_of
from drivetrain_conformance.harness.testbench import Bench, NoOracle, TooLate, check_held, in_time, until_idle
from drivetrain_conformance.harness.time_limits import result_of, within
from drivetrain_conformance.references.reference_sampling import steps

_T = TypeVar("_T")

QUIET: Final = 0.1
"""Seconds during which nothing may happen: long enough for a request of a few tokens to finish."""
TOKENS: Final = 250
"""Length of a request that is in flight for a while and whose end the case awaits."""
_HOT: Final = 1028.5
"""A temperature that float16 and bfloat16 round, and at which the model's own logits hardly matter."""
_SOON: Final = 20.0
"""Timeout, in seconds, of a request of two tokens that nothing holds up."""


# The table ------------------------------------------------------------------------------------------------------------


@case(Capability.PAUSE_ABORT)
async def abort_ends_requests_in_flight(bench: Bench) -> None:
    """Pausing by abort returns requests in flight, aborted, with their tokens so far; arrivals wait, then run."""
    engine = bench.engine
    await _pauses_when_idle(bench, PauseMode.ABORT)
    prompts, params = bench.prompts(2), _long(bench)
    whole = await engine.generate(prompts, params)
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(PauseMode.ABORT)
        _check_paused(engine, PauseMode.ABORT)
        ended = await result_of(task)
        await engine.pause_generation(PauseMode.ABORT)
        async with _arrival(bench):
            await engine.continue_generation()
    _check_running(engine)
    for part, complete in zip(ended.completions, whole.completions, strict=True):
        _check_cut(bench, part, complete)


@case(Capability.PAUSE_WAIT)
async def wait_lets_requests_in_flight_end(bench: Bench) -> None:
    """Pausing by wait returns once all requests in flight have ended by themselves; arrivals wait, then run."""
    engine = bench.engine
    await _pauses_when_idle(bench, PauseMode.WAIT)
    prompts, params = bench.prompts(2), _long(bench)
    whole = await engine.generate(prompts, params)
    task = asyncio.create_task(engine.generate(prompts, params))
    await _begun(engine, task, len(prompts))

    async def pause() -> int:
        await engine.pause_generation(PauseMode.WAIT)
        return (await engine.stats()).running  # ask at once: a little later they would have ended anyway

    pausing = asyncio.create_task(pause())
    await _is_paused(engine)
    async with _arrival(bench):
        assert not await result_of(pausing), "the pause returned while requests were in flight"
        _check_paused(engine, PauseMode.WAIT)
        ended = await result_of(task)
        await engine.pause_generation(PauseMode.WAIT)
        await engine.continue_generation()
    _check_running(engine)
    check_same(bench, ended.completions, whole.completions)


@case(Capability.PAUSE_IN_PLACE)
async def in_place_freezes_requests_in_flight(bench: Bench) -> None:
    """Requests frozen in place make no progress, then continue as if never paused; arrivals wait, then run."""
    await _freezes(bench, PauseMode.IN_PLACE)


@case(Capability.PAUSE_RETRACT)
async def retract_freezes_requests_in_flight(bench: Bench) -> None:
    """Retracted requests make no progress, then continue as if never paused; arrivals wait, then run."""
    await _freezes(bench, PauseMode.RETRACT)


@case(Capability.PAUSE_IN_PLACE, Capability.STREAMING)
async def no_token_is_made_while_frozen_in_place(bench: Bench) -> None:
    """A stream frozen in place shows nothing more until generation continues, and then the rest."""
    await _stream_stands_still(bench, PauseMode.IN_PLACE)


@case(Capability.PAUSE_RETRACT, Capability.STREAMING)
async def no_token_is_made_while_retracted(bench: Bench) -> None:
    """A retracted stream shows nothing more until generation continues, and then the rest."""
    await _stream_stands_still(bench, PauseMode.RETRACT)


@case(Capability.PAUSE_WAIT, Capability.STREAMING)
async def a_stream_that_arrives_waits(bench: Bench) -> None:
    """A stream that is opened while the engine is paused shows nothing until generation continues."""
    engine = bench.engine
    prompt = bench.prompt()
    await _can_pause(engine, PauseMode.WAIT)
    begun = time.monotonic()
    _ = [chunk async for chunk in engine.generate_stream(prompt, SamplingParams(max_new_tokens=1))]
    first_chunk = time.monotonic() - begun
    await engine.pause_generation(PauseMode.WAIT)
    async with _streamed(engine, prompt, SamplingParams(max_new_tokens=8, temperature=0)) as (chunks, reading):
        await asyncio.sleep(max(QUIET, 3 * first_chunk))  # long enough for a chunk, even on a busy machine
        assert chunks == []
        assert not reading.done()
        await engine.continue_generation()
        await result_of(reading)
    (whole,) = await bench.greedy([prompt], 8)
    last = chunks[-1].completion
    assert last is not None
    check_same(bench, [last], [whole])


@case(Capability.PAUSE_WAIT)
async def all_that_arrived_is_served(bench: Bench) -> None:
    """Every request that arrived during a pause is served once generation continues."""
    engine = bench.engine
    prompts = bench.prompts(12)
    whole = await bench.greedy(prompts, 6)
    await engine.pause_generation(PauseMode.WAIT)
    tasks = [asyncio.create_task(bench.greedy([prompt], 6)) for prompt in prompts]
    await asyncio.sleep(QUIET)
    assert not any(task.done() for task in tasks)
    await engine.continue_generation()
    check_same(bench, [(await result_of(task))[0] for task in tasks], whole)


# Again, and one after another -----------------------------------------------------------------------------------------


@case()
async def going_on_without_a_pause_changes_nothing(bench: Bench) -> None:
    """Continuing an engine that is not paused raises no error, however often, and the engine serves on."""
    engine = bench.engine
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    task = asyncio.create_task(bench.greedy(prompts))
    for _ in range(3):
        await engine.continue_generation()
        _check_running(engine)
    check_same(bench, await result_of(task), before)
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.PAUSE_WAIT)
async def an_unknown_mode_is_refused(bench: Bench) -> None:
    """An unknown mode is refused, naming argument and value; a running engine runs on, a paused one stays paused."""
    engine = bench.engine
    await _unknown_mode_is_refused(engine)
    _check_running(engine)
    await bench.greedy(bench.prompts(1))
    await engine.pause_generation(PauseMode.WAIT)
    await _unknown_mode_is_refused(engine)
    _check_paused(engine, PauseMode.WAIT)
    async with _arrival(bench):
        await engine.continue_generation()


@case(Capability.PAUSE_WAIT)
async def many_callers_at_once(bench: Bench) -> None:
    """Concurrent callers that pause, continue and generate leave an engine that runs and answers correctly."""
    engine = bench.engine
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    answers = [asyncio.create_task(bench.greedy(prompts)) for _ in range(4)]
    callers = [
        asyncio.create_task(engine.pause_generation(PauseMode.WAIT) if turn % 2 else engine.continue_generation())
        for turn in range(12)
    ]
    for caller in callers:
        await result_of(caller)
    await engine.continue_generation()
    _check_running(engine)
    for answer in answers:
        check_same(bench, await result_of(answer), before)


@case(Capability.PAUSE_ABORT, Capability.PAUSE_WAIT, Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT)
async def any_mode_may_follow_any(bench: Bench) -> None:
    """An idle engine can be paused in any mode after any other; arrivals wait in each, and one continue ends it."""
    engine = bench.engine
    await _can_pause(engine, *PauseMode)
    for first, second in itertools.product(PauseMode, PauseMode):
        await engine.pause_generation(first)
        _check_paused(engine, first)
        earlier = asyncio.create_task(bench.greedy(bench.prompts(1), 1))
        await asyncio.sleep(0.01)
        await engine.pause_generation(second.value)
        released = (first, second) == (PauseMode.RETRACT, PauseMode.IN_PLACE)
        _check_paused(engine, PauseMode.RETRACT if released else second)
        task = asyncio.create_task(bench.greedy(bench.prompts(1), 1))
        await asyncio.sleep(0.01)
        assert not earlier.done(), f"a request that arrived after {first.value} did not wait through {second.value}"
        assert not task.done(), f"a request that arrived after {first.value} and {second.value} did not wait"
        await engine.continue_generation()
        _check_running(engine)
        await result_of(earlier)
        await result_of(task)


@case(Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT)
async def one_freeze_can_follow_the_other(bench: Bench) -> None:
    """Requests frozen in place can be retracted, and the reverse; no token is lost or changed."""
    engine = bench.engine
    await _can_pause(engine, PauseMode.IN_PLACE, PauseMode.RETRACT)
    prompts, params = bench.prompts(2), _long(bench)
    whole = await engine.generate(prompts, params)
    counted: list[tuple[int, int]] = []
    for modes in ((PauseMode.IN_PLACE, PauseMode.RETRACT), (PauseMode.RETRACT, PauseMode.IN_PLACE)):
        async with bench.in_flight(prompts, params) as task:
            for mode in modes:
                await engine.pause_generation(mode)
            _check_paused(engine, PauseMode.RETRACT)  # a cache that was released does not come back
            await check_held(engine, task)
            await asyncio.sleep(QUIET)
            assert not task.done()
            stats = await engine.stats()
            counted.append((stats.running, stats.waiting))
            await engine.continue_generation()
            resumed = await result_of(task)
        check_same(bench, resumed.completions, whole.completions)
    if any(sum(held) < len(prompts) for held in counted):
        raise TooLate(f"of {len(prompts)} frozen requests, these were running and waiting: {counted}")
    assert counted[0] == counted[1], f"running and waiting are {counted[0]} if retracted last, {counted[1]} if first"


@case(Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT)
async def many_pauses_change_no_token(bench: Bench) -> None:
    """Requests that are frozen repeatedly, in both modes in turn, end with the tokens of an undisturbed run."""
    engine = bench.engine
    modes = (PauseMode.IN_PLACE, PauseMode.RETRACT)
    await _can_pause(engine, *modes)
    prompts, params = bench.prompts(3), _long(bench)
    whole = await engine.generate(prompts, params)
    async with bench.in_flight(prompts, params, tokens=0) as task:
        for turn in range(bench.profile.cycles):
            await engine.pause_generation(modes[turn % 2])
            await engine.continue_generation()
            if task.done():
                break
        resumed = await result_of(task)
    check_same(bench, resumed.completions, whole.completions)


@case(Capability.PAUSE_ABORT, Capability.PAUSE_IN_PLACE)
async def abort_ends_what_was_frozen_in_place(bench: Bench) -> None:
    """Pausing by abort after in_place returns the frozen requests, aborted, with their tokens so far."""
    await _abort_ends_what_is_frozen(bench, PauseMode.IN_PLACE)


@case(Capability.PAUSE_ABORT, Capability.PAUSE_RETRACT)
async def abort_ends_what_was_retracted(bench: Bench) -> None:
    """Pausing by abort after retract returns the frozen requests, aborted, with their tokens so far."""
    await _abort_ends_what_is_frozen(bench, PauseMode.RETRACT)


@case(Capability.PAUSE_WAIT, Capability.PAUSE_IN_PLACE)
async def waiting_for_frozen_requests_is_refused(bench: Bench) -> None:
    """Pausing by wait while requests are frozen is refused at once, as it would never return; nothing changes."""
    engine = bench.engine
    await _can_pause(engine, PauseMode.IN_PLACE, PauseMode.WAIT)
    prompts, params = bench.prompts(2), _long(bench)
    whole = await engine.generate(prompts, params)
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(PauseMode.IN_PLACE)
        await check_held(engine, task)
        with refused(EngineStateError, state="paused", otherwise="it returned, though what is in flight has not ended"):
            async with within():
                await engine.pause_generation(PauseMode.WAIT)
        _check_paused(engine, PauseMode.IN_PLACE)
        await asyncio.sleep(QUIET)
        assert not task.done()
        await engine.continue_generation()
        resumed = await result_of(task)
    check_same(bench, resumed.completions, whole.completions)


# Ending what is paused ------------------------------------------------------------------------------------------------


@case(Capability.ABORT, Capability.PAUSE_IN_PLACE)
async def a_request_frozen_in_place_can_be_aborted(bench: Bench) -> None:
    """Aborting one frozen request returns it with its tokens so far; the others stay frozen and then continue."""
    await _frozen_request_can_be_aborted(bench, PauseMode.IN_PLACE)


@case(Capability.ABORT, Capability.PAUSE_RETRACT)
async def a_retracted_request_can_be_aborted(bench: Bench) -> None:
    """Aborting one retracted request returns it with its tokens so far; the others stay frozen and then continue."""
    await _frozen_request_can_be_aborted(bench, PauseMode.RETRACT)


@case(Capability.ABORT, Capability.PAUSE_WAIT)
async def a_request_that_waits_can_be_aborted(bench: Bench) -> None:
    """Aborting a request that arrived during a pause returns it without a token; the others keep waiting, then run."""
    engine = bench.engine
    await engine.abort("an id that no request has")
    await _can_pause(engine, PauseMode.WAIT)
    prompts = bench.prompts(3)
    params = SamplingParams(max_new_tokens=6, temperature=0, n=2)
    await engine.pause_generation(PauseMode.WAIT)
    one, other, third = (
        asyncio.create_task(engine.generate(prompt, params, request_ids=[request_id]))
        for prompt, request_id in zip(prompts, ("one", "one more", "third"), strict=True)
    )
    await asyncio.sleep(QUIET)
    await engine.abort("one")
    for completion in (await result_of(one)).completions:
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.token_ids == []
        assert completion.text == ""
    assert engine.is_paused
    assert not other.done()
    await engine.abort_generation()
    for completion in (await result_of(other)).completions + (await result_of(third)).completions:
        assert completion.finish_reason is FinishReason.ABORT
    assert engine.is_paused, "aborting requests does not end the pause"
    async with _arrival(bench):
        await engine.continue_generation()


@case(Capability.PAUSE_WAIT)
async def an_arrival_that_is_cancelled_is_gone(bench: Bench) -> None:
    """Cancelling a call whose request waits in a pause removes the request and frees its id."""
    engine = bench.engine
    prompt = bench.prompt()
    await engine.pause_generation(PauseMode.WAIT)
    for _ in range(2):
        task = asyncio.create_task(engine.generate(prompt, bench.long(), request_ids=["mine"]))
        await asyncio.sleep(0.01)
        task.cancel()
        async with within():
            await asyncio.wait([task])
    await engine.continue_generation()
    await asyncio.sleep(QUIET)
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    async with within():
        await engine.generate(prompt, bench.long(2), request_ids=["mine"])


@case(Capability.PAUSE_IN_PLACE)
async def a_frozen_call_that_is_cancelled_is_gone(bench: Bench) -> None:
    """Cancelling a call whose requests are frozen removes the requests and frees their ids."""
    engine = bench.engine
    await _can_pause(engine, PauseMode.IN_PLACE)
    async with bench.in_flight(bench.prompts(2), bench.long(), request_ids=["a", "b"]) as task:
        await engine.pause_generation(PauseMode.IN_PLACE)
        task.cancel()
        async with within():
            await asyncio.wait([task])
        await until_idle(engine)
        assert engine.is_paused
        async with _arrival(bench):
            await engine.continue_generation()
    await until_idle(engine)
    async with within():
        await engine.generate(bench.prompts(2), bench.long(2), request_ids=["a", "b"])
    await _pauses_are_given_up(bench)


async def _pauses_are_given_up(bench: Bench) -> None:
    """Check that a pause whose caller leaves, at many moments, leaves no request frozen in an engine that is ready."""
    engine, prompt = bench.engine, bench.prompt()
    async with bench.in_flight(bench.prompts(2), bench.long()):
        for after in MOMENTS:
            await given_up(engine.pause_generation(PauseMode.IN_PLACE), after)
            if engine.is_paused:  # the pause was complete by then
                await engine.continue_generation()
            async with within("a request after a pause that was given up", seconds=_SOON):
                await engine.generate(prompt, bench.long(2))


@case(Capability.PAUSE_WAIT)
async def an_arrival_does_not_wait_for_ever(bench: Bench) -> None:
    """A request's timeout includes its wait in a pause; on timeout it ends in DeadlineExceeded and is removed."""
    engine = bench.engine
    prompt = bench.prompt()
    await engine.pause_generation(PauseMode.WAIT)
    with refused(DeadlineExceeded, naming=f"{QUIET:g} s", otherwise="a paused engine served a request"):
        async with within():
            await engine.generate(prompt, bench.long(), timeout=QUIET)
    assert engine.is_paused
    async with _arrival(bench):
        await engine.continue_generation()
    await until_idle(engine)


@case(Capability.PAUSE_WAIT, Capability.ABORT)
async def a_pause_that_takes_too_long_leaves_the_engine_running(bench: Bench) -> None:
    """Pausing by wait that times out raises DeadlineExceeded; the engine stays unpaused, and requests go on."""
    engine = bench.engine
    await engine.abort("an id that no request has")
    prompts, params = bench.prompts(2), _long(bench)
    whole = await engine.generate(prompts, params)
    async with bench.in_flight(prompts, params, tokens=0) as task:
        returned = "the pause returned while requests were in flight"
        with in_time(task), refused(DeadlineExceeded, naming="0.02 s", otherwise=returned):
            async with within():
                await engine.pause_generation(PauseMode.WAIT, timeout=0.02)
        _check_running(engine)
        async with within():
            await engine.generate(bench.prompt(), SamplingParams(max_new_tokens=1))
        if task.done():
            raise TooLate("the requests ended before the one that came after the pause")
        ended = await result_of(task)
    check_same(bench, ended.completions, whole.completions)


@case(Capability.PAUSE_WAIT, own_engine=True)
async def closing_a_paused_engine_leaves_nothing_waiting(bench: Bench) -> None:
    """A request that waits in a pause comes back aborted, without a token, when the engine is closed."""
    async with bench.open() as engine:
        await engine.pause_generation(PauseMode.WAIT)
        task = asyncio.create_task(engine.generate(bench.prompt(engine=engine), SamplingParams(max_new_tokens=4)))
        await asyncio.sleep(QUIET)
        assert not task.done()
        async with within():
            await engine.teardown()
    assert engine.state is EngineState.CLOSED
    (completion,) = (await result_of(task)).completions
    assert (completion.finish_reason, completion.token_ids) == (FinishReason.ABORT, [])


@case(Capability.PAUSE_IN_PLACE, Capability.ABORT, own_engine=True)
async def closing_returns_frozen_requests(bench: Bench) -> None:
    """Requests that are frozen when the engine is closed come back aborted, with their tokens so far."""
    async with bench.open() as engine:
        await engine.abort("an id that no request has")
        await _can_pause(engine, PauseMode.IN_PLACE)
        ignore_eos = engine.supports(Capability.IGNORE_EOS)
        params = SamplingParams(max_new_tokens=800, temperature=0, ignore_eos=ignore_eos)
        async with bench.in_flight(bench.prompts(2, engine=engine), params, engine) as task:
            await engine.pause_generation(PauseMode.IN_PLACE)
            await check_held(engine, task)
            async with within():
                await engine.teardown()
            for completion in (await result_of(task)).completions:
                assert completion.finish_reason is FinishReason.ABORT
                assert 0 < len(completion.token_ids) < 800


# Caches and logprobs --------------------------------------------------------------------------------------------------


@case(Capability.PAUSE_WAIT, Capability.PREFIX_CACHE)
async def a_pause_keeps_the_prefix_cache(bench: Bench) -> None:
    """A pause keeps every cached prefix, and a reset within it drops all; answers are the same either way."""
    engine = bench.engine
    await _can_pause(engine, PauseMode.WAIT)
    await engine.reset_prefix_cache()
    prompt = bench.prompt(300)
    (cold,) = await bench.greedy([prompt])
    await engine.pause_generation(PauseMode.WAIT)
    await engine.continue_generation()
    (warm,) = await bench.greedy([prompt])
    await engine.pause_generation(PauseMode.WAIT)
    await engine.reset_prefix_cache()
    await engine.continue_generation()
    (reset,) = await bench.greedy([prompt])
    assert (cold.cached_tokens, reset.cached_tokens) == (0, 0)
    assert warm.cached_tokens > 0
    check_same(bench, [warm, reset], [cold, cold])


@case(Capability.PAUSE_IN_PLACE, Capability.PREFIX_CACHE)
async def a_reset_of_the_prefix_cache_spares_frozen_requests(bench: Bench) -> None:
    """Resetting the prefix cache changes no token of requests that are frozen in place.

    Prefixes of other requests are discarded beside them.
    """
    engine, ended = bench.engine, bench.prompt(300)
    await _can_pause(engine, PauseMode.IN_PLACE)
    await engine.reset_prefix_cache()
    await bench.greedy([ended])
    prompts, params = bench.prompts(3, 40), bench.long(TOKENS, prompt_length=40)
    whole = await engine.generate(prompts, params)
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(PauseMode.IN_PLACE)
        await engine.reset_prefix_cache()
        await engine.continue_generation()
        (again,) = await bench.greedy([ended])
        resumed = await result_of(task)
    check_same(bench, resumed.completions, whole.completions)
    assert again.cached_tokens == 0, f"after the reset {again.cached_tokens} tokens of an earlier prompt were found"


@case(Capability.PAUSE_RETRACT, Capability.LOGPROBS_RAW)
async def logprobs_stay_true_across_a_retraction(bench: Bench) -> None:
    """Each logprob of a retracted request equals that of an independent forward pass."""
    engine = bench.engine
    await _can_pause(engine, PauseMode.RETRACT)
    params = bench.long(TOKENS, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    async with bench.in_flight(bench.prompts(2), params) as task:
        await engine.pause_generation(PauseMode.RETRACT)
        await engine.continue_generation()
        resumed = await result_of(task)
    for completion in resumed.completions:
        assert completion.logprobs is not None
        expected = bench.output_logprobs(completion)
        worst = max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))
        assert worst <= bench.tolerance(), f"a logprob is off by {worst:.3g} nats"


# ----------------------------------------------------------------------------------------------------------------------


def _check_paused(engine: InferenceEngine, mode: PauseMode) -> None:
    assert engine.is_paused
    assert engine.state is EngineState.PAUSED
    assert engine.status.paused is mode
    assert engine.describe().state == "paused"


def _check_running(engine: InferenceEngine) -> None:
    assert not engine.is_paused
    assert engine.state is EngineState.READY
    assert engine.status.paused is None
    assert engine.describe().state == "ready"


async def _can_pause(engine: InferenceEngine, *modes: PauseMode) -> None:
    """Pause an idle engine in each mode, so that an engine without one refuses before the case changes anything."""
    for mode in modes:
        await engine.pause_generation(mode)
        await engine.continue_generation()


async def _begun(engine: InferenceEngine, task: asyncio.Task[GenerationOutput], count: int = 1) -> None:
    """Return once the engine runs this many requests, or has already finished them."""
    async with within():
        while (await engine.stats()).running < count and not task.done():  # noqa: ASYNC110 - it may be another process
            await asyncio.sleep(0.002)


async def _is_paused(engine: InferenceEngine) -> None:
    async with within():
        while not engine.is_paused:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


@asynccontextmanager
async def _arrival(bench: Bench) -> AsyncGenerator[None, None]:
    """Require a request to wait at the paused engine, and to be answered after the block has continued it."""
    engine = bench.engine
    prompt = bench.prompt()
    before = (await engine.stats()).running
    task = asyncio.create_task(bench.greedy([prompt]))
    try:
        await asyncio.sleep(QUIET)
        assert not task.done(), "a request that arrived while the engine was paused did not wait"
        assert (await engine.stats()).running <= before, "a request that arrived while the engine was paused runs"
        yield
        answer = await result_of(task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    check_same(bench, answer, await bench.greedy([prompt]))


async def _pauses_when_idle(bench: Bench, mode: PauseMode) -> None:
    """Pause an idle engine twice, once by the mode's name; one continue must end the pause."""
    engine = bench.engine
    await engine.pause_generation(mode)
    await engine.pause_generation(mode.value)
    _check_paused(engine, mode)
    async with _arrival(bench):
        await engine.continue_generation()
        await engine.continue_generation()
    _check_running(engine)


async def _freezes(bench: Bench, mode: PauseMode) -> None:
    engine = bench.engine
    await _pauses_when_idle(bench, mode)
    params = [_long(bench), *with_a_state(bench, TOKENS)]
    prompts = bench.prompts(len(params))
    begun = time.monotonic()
    whole = await engine.generate(prompts, params)
    undisturbed = time.monotonic() - begun
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(mode)
        await engine.pause_generation(mode)
        _check_paused(engine, mode)
        await check_held(engine, task)
        stats = await engine.stats()
        assert stats.running + stats.waiting == len(prompts), f"of {len(prompts)} frozen requests it counts {stats}"
        if mode is PauseMode.IN_PLACE:
            assert stats.running == len(prompts), f"of {len(prompts)} requests frozen in the batch it counts {stats}"
        async with _arrival(bench):
            await asyncio.sleep(undisturbed)
            assert not task.done(), "requests ran to their end while they were frozen"
            await engine.continue_generation()
        resumed = await result_of(task)
    _check_running(engine)
    check_same(bench, resumed.completions, whole.completions)
    if bench.claims(Capability.LOGIT_BIAS) and bench.claims(Capability.LOGPROBS_PROCESSED):
        await _check_temperature_is_kept(bench, mode)
    await _goes_on_without_its_holder(bench, mode, prompts, params, whole.completions)


async def _check_temperature_is_kept(bench: Bench, mode: PauseMode) -> None:
    """Check that a temperature loses no digit by a freeze: a bias as large as it makes one token as likely as all."""
    bias = _HOT * math.log(bench.engine.model_info.vocab_size)
    biased = {bench.prompt(1)[0]: bias}
    processed = LogprobsMode.PROCESSED
    params = bench.long(TOKENS, temperature=_HOT, logit_bias=biased, logprobs=0, logprobs_mode=processed)
    async with bench.in_flight(bench.prompts(1), params) as task:
        await bench.engine.pause_generation(mode)
        await check_held(bench.engine, task)
        await bench.engine.continue_generation()
        (completion,) = (await result_of(task)).completions
    try:
        rows = bench.output_logits(completion)
    except NoOracle:
        return
    assert completion.logprobs is not None
    drawn = zip(steps(completion, rows, params, bench.tolerance()), completion.token_ids, strict=True)
    for at, (found, (step, token)) in enumerate(zip(completion.logprobs, drawn, strict=True)):
        expected = step.processed[token]
        assert abs(found - expected) <= bench.tolerance(), (
            f"frozen {mode.value} at temperature {_HOT:g}, token {at} has the logprob {found:.5f}, not {expected:.5f}"
        )


async def _goes_on_without_its_holder(
    bench: Bench,
    mode: PauseMode,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    whole: Sequence[Completion],
) -> None:
    """Let a holder in another process pause, and kill it: nobody else would end its pause."""
    engine = bench.engine
    async with holder_of(engine) as holder, bench.in_flight(prompts, params) as task:
        await holder.pause(mode)
        await _is_paused(engine)  # a remote engine's page hears of it a little later
        _check_paused(engine, mode)
        await check_held(engine, task)
        async with _arrival(bench):
            holder.kill()
            async with within("the pause of a holder that was killed", LIFTED_S):
                while engine.is_paused:  # noqa: ASYNC110 - the engine may be another process's
                    await asyncio.sleep(0.005)
        resumed = await result_of(task)
    _check_running(engine)
    check_same(bench, resumed.completions, whole)


def _check_cut(bench: Bench, part: Completion, whole: Completion) -> None:
    """Raise unless ``part`` was aborted on its way, and begins ``whole``."""
    with in_time(part):
        assert part.finish_reason is FinishReason.ABORT
    assert 0 < len(part.token_ids) < len(whole.token_ids)
    check_prefix(bench, part, whole)


def _long(bench: Bench) -> SamplingParams:
    """Return params of a request that is in flight for a while, with all the logprobs that the engine has."""
    return bench.long(TOKENS, **every_logprob(bench, LogprobsMode.RAW))


@asynccontextmanager
async def _streamed(
    engine: InferenceEngine, prompt: Sequence[int], params: SamplingParams
) -> AsyncGenerator[tuple[list[CompletionChunk], asyncio.Task[None]], None]:
    """Read a stream in a task; yield the list of its chunks so far, and the task."""
    chunks: list[CompletionChunk] = []

    async def read() -> None:
        async for chunk in engine.generate_stream(list(prompt), params):
            chunks.append(chunk)

    reading = asyncio.create_task(read())
    try:
        yield chunks, reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _stream_stands_still(bench: Bench, mode: PauseMode) -> None:
    engine = bench.engine
    await _can_pause(engine, mode)
    prompt, params = bench.prompt(), (with_a_state(bench, TOKENS) or [bench.long(TOKENS)])[-1]
    (whole,) = (await engine.generate(prompt, params)).completions

    async with _streamed(engine, prompt, params) as (chunks, reading):
        try:
            async with within():
                while len(chunks) < 5 and not reading.done():  # noqa: ASYNC110 - chunks come one by one
                    await asyncio.sleep(0.001)
            await engine.pause_generation(mode)
            await asyncio.sleep(QUIET)  # tokens made before the pause may still be on their way
            await check_held(engine, reading)
            shown = sum(len(chunk.token_ids) for chunk in chunks)
            await asyncio.sleep(3 * QUIET)
            late = sum(len(chunk.token_ids) for chunk in chunks) - shown
            assert late == 0, f"{late} tokens were made while the request was frozen ({mode.value})"
            assert not reading.done(), "the stream ended while its request was frozen"
            assert shown < len(whole.token_ids)
        finally:
            await engine.continue_generation()
        await result_of(reading)
    last = chunks[-1].completion
    assert last is not None
    assert [token for chunk in chunks for token in chunk.token_ids] == last.token_ids
    check_same(bench, [last], [whole])


async def _abort_ends_what_is_frozen(bench: Bench, frozen: PauseMode) -> None:
    engine = bench.engine
    await _can_pause(engine, frozen, PauseMode.ABORT)
    prompts, params = bench.prompts(2), _long(bench)
    whole = await engine.generate(prompts, params)
    async with bench.in_flight(prompts, params) as task:
        await engine.pause_generation(frozen)
        async with within():
            await engine.pause_generation(PauseMode.ABORT)
        _check_paused(engine, PauseMode.ABORT)
        ended = await result_of(task)
        async with _arrival(bench):
            await engine.continue_generation()
    for part, complete in zip(ended.completions, whole.completions, strict=True):
        _check_cut(bench, part, complete)


async def _frozen_request_can_be_aborted(bench: Bench, mode: PauseMode) -> None:
    engine = bench.engine
    await engine.abort("an id that no request has")
    await _can_pause(engine, mode)
    prompts, params = bench.prompts(2), _long(bench)
    whole = (await engine.generate(prompts, params)).completions
    async with (
        bench.in_flight(prompts[:1], params, request_ids=["one"]) as one,
        bench.in_flight(prompts[1:], params, request_ids=["other"]) as other,
    ):
        await engine.pause_generation(mode)
        await check_held(engine, one, other)
        await engine.abort("one")
        (part,) = (await result_of(one)).completions
        _check_cut(bench, part, whole[0])
        _check_paused(engine, mode)
        await asyncio.sleep(QUIET)
        assert not other.done()
        await engine.continue_generation()
        check_same(bench, (await result_of(other)).completions, whole[1:])


async def _unknown_mode_is_refused(engine: InferenceEngine) -> None:
    taken = "there is no pause mode 'hibernate', but it was taken"
    with refused(InvalidRequest, field="mode", naming="hibernate", otherwise=taken):
        await engine.pause_generation("hibernate")
