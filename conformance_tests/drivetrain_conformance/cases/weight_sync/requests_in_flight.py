"""Requests in flight during an update."""

from __future__ import annotations

import asyncio
from typing import Final

from drivetrain.engine.states import EngineState
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain_conformance.assertions.lasting_state import with_a_state
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assertions.weight_checks import check_made_by
from drivetrain_conformance.assets.weight_sources import from_disk
from drivetrain_conformance.cases.weight_sync.checks import (
    NEW,
    TOKENS,
    Late,
    check_boundary,
    check_kept_cache,
    check_late,
    check_logprobs,
    check_serves,
    check_spans,
    check_state,
    same_label_again,
    same_weights_again,
    update_in_flight,
)
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, check_held, in_time

_SPANS: Final = (Capability.WEIGHTS_DISK, Capability.VERSION_SPANS, Capability.LOGPROBS_RAW)


async def _check_state_is_kept(bench: Bench, mode: PauseMode) -> None:
    """Check that an update to the same weights changes no token, not even of requests that depend on other state."""
    engine, own = bench.engine, bench.engine.get_weight_version()
    await same_weights_again(bench)
    params = with_a_state(bench, TOKENS)
    prompts = bench.prompts(len(params))
    if not params:
        return
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params) as running:
        await engine.load_weights_from_disk(str(bench.model), "the same again", mode=mode)
        if running.done():
            for completion in (await running).completions:
                ended = f"the update ended it: the spans are {completion.weight_versions}"
                assert completion.finish_reason is not FinishReason.ABORT, ended
            raise TooLate("the requests ended before the update, so this shows nothing")
        check_same(bench, (await running).completions, whole)
    await engine.load_weights_from_disk(str(bench.model), own)


@case(*_SPANS, Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT, Capability.PAUSE_RETRACT, changes_weights=True, slow=True)
async def retracted_requests_go_on_with_the_new_weights(bench: Bench) -> None:
    """Requests retracted for an update continue as if the new weights had read their tokens; spans mark the switch.

    They keep all other state: their random stream, schedule, counts and half-written stop text.
    """
    await _check_state_is_kept(bench, PauseMode.RETRACT)
    updated = await update_in_flight(bench, PauseMode.RETRACT)
    for completion in updated.completions:
        check_spans(completion, updated.old, NEW)
        check_boundary(bench, completion, bench.model, bench.other_weights())
        before, after = completion.weight_versions
        check_logprobs(bench, completion, bench.model, before)
        check_logprobs(bench, completion, bench.other_weights(), after)
    check_late(bench, updated)


@case(*_SPANS, Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE, Capability.PAUSE_IN_PLACE, changes_weights=True)
async def frozen_requests_go_on_where_they_were(bench: Bench) -> None:
    """Requests frozen in place for an update continue on their cache; spans mark the switch to the new weights.

    They keep all other state: their random stream, schedule, counts and half-written stop text.
    """
    await _check_state_is_kept(bench, PauseMode.IN_PLACE)
    updated = await update_in_flight(bench, PauseMode.IN_PLACE)
    for completion in updated.completions:
        check_spans(completion, updated.old, NEW)
        check_boundary(bench, completion, bench.model, bench.other_weights(), recomputed=False)
        check_logprobs(bench, completion, bench.model, completion.weight_versions[0])
        check_kept_cache(bench, completion, bench.model, bench.other_weights())
    check_late(bench, updated)
    await _names_no_version_to_come(bench)


async def _names_no_version_to_come(bench: Bench) -> None:
    """Update while a request runs that ends soon, and check that its completion names no version before the engine."""
    engine, version = bench.engine, "to-come"
    async with bench.in_flight([bench.prompt()], bench.long(60 * (bench.attempt + 1))) as running:
        push = from_disk(bench.other_weights(), version, mode=PauseMode.IN_PLACE)
        updating = asyncio.create_task(engine.update_named_weights(push))
        (completion,) = (await running).completions
        published = engine.get_weight_version()
        await updating
    last = completion.weight_versions[-1].version
    if last != version:
        raise TooLate("the request ended before the update, so this shows nothing")
    assert published == version, f"a completion named {last!r} when the engine served {published!r}"


@case(*_SPANS, Capability.PAUSE_ABORT, changes_weights=True)
async def aborted_requests_are_of_the_old_weights_alone(bench: Bench) -> None:
    """Requests aborted for an update return their tokens so far, all made by the old weights and labelled so."""
    updated = await update_in_flight(bench, PauseMode.ABORT)
    for completion in updated.completions:
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT
        check_spans(completion, updated.old)
        check_logprobs(bench, completion, bench.model, completion.weight_versions[0])
    check_late(bench, updated)


@case(*_SPANS, Capability.PAUSE_WAIT, changes_weights=True)
async def awaited_requests_end_before_the_weights_change(bench: Bench) -> None:
    """Requests that an update waits for run to their end, all made by the old weights and labelled so."""
    updated = await update_in_flight(bench, PauseMode.WAIT)
    for completion in updated.completions:
        assert completion.finish_reason is not FinishReason.ABORT
        check_spans(completion, updated.old)
        check_logprobs(bench, completion, bench.model, completion.weight_versions[0])
    check_late(bench, updated)


@case(
    Capability.WEIGHTS_DISK,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.VERSION_SPANS,
    Capability.PAUSE_RETRACT,
    changes_weights=True,
)
async def requests_frozen_by_a_pause_go_on_after_it(bench: Bench) -> None:
    """Requests frozen by a pause stay frozen during an update; continuing resumes them with the new weights."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    await same_weights_again(bench)
    await same_label_again(engine)
    async with bench.in_flight(bench.prompts(2), bench.long(TOKENS)) as running:
        await engine.pause_generation("retract")
        await engine.load_weights_from_disk(str(other), NEW)
        check_state(engine, EngineState.PAUSED)
        await check_held(engine, running)
        done, _ = await asyncio.wait([running], timeout=0.05)
        assert not done, "the update let requests go on that a pause had frozen"
        await engine.continue_generation()
        for completion in (await running).completions:
            check_spans(completion, version, NEW)
            check_boundary(bench, completion, bench.model, other)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, Capability.PAUSE_WAIT, changes_weights=True)
async def an_update_while_paused_leaves_the_engine_paused(bench: Bench) -> None:
    """Two updates during a pause do not end it; requests that waited are served by the second when it ends."""
    engine, first, second = bench.engine, bench.other_weights(2), bench.other_weights(1)
    await same_weights_again(bench)
    await engine.pause_generation("wait")
    async with Late(bench) as late:
        late.arrive()
        await engine.load_weights_from_disk(str(first), "first")
        await engine.load_weights_from_disk(str(second), "second")
        check_state(engine, EngineState.PAUSED)
        assert await late.is_held(), "the update ended the pause"
        await engine.continue_generation()
        check_made_by(bench, [await late.completion()], second)
    await check_serves(bench, second, "second")
