"""Prefixes of older weights."""

from __future__ import annotations

import asyncio
from typing import Final

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, VersionSpan
from drivetrain_conformance.assertions.weight_checks import check_made_by
from drivetrain_conformance.assets.weight_sources import from_disk
from drivetrain_conformance.cases.weight_sync.checks import NEW, TOKENS, check_logprobs, one
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, check_held, end_requests, until_idle
from drivetrain_conformance.harness.time_limits import result_of, within

_AT_ONCE: Final = 2
"""Requests that the engine runs at once."""
_WAITING: Final = 3
"""Requests that are to wait: more than an engine that runs nothing, the other one of a fleet, takes up."""
LONG_PROMPT: Final = 320
"""In tokens; caches find prefixes in whole blocks, of up to 128 tokens."""


@case(Capability.WEIGHTS_DISK, Capability.PREFIX_CACHE, changes_weights=True)
async def no_prefix_of_older_weights_is_used(bench: Bench) -> None:
    """A prompt cached under older weights is computed again after an update, and then cached under the new ones."""
    engine, other = bench.engine, bench.other_weights()
    await engine.reset_prefix_cache()
    prompt = bench.prompt(LONG_PROMPT)
    await one(bench, prompt)
    assert (await one(bench, prompt)).cached_tokens > 0, "the prompt was not cached, so the rest shows nothing"
    await engine.load_weights_from_disk(str(other), NEW)
    after = await one(bench, prompt)
    assert after.cached_tokens == 0
    again = await one(bench, prompt)
    assert again.cached_tokens > 0
    check_made_by(bench, [after, again], other)


@case(Capability.WEIGHTS_DISK, Capability.PREFIX_CACHE, changes_weights=True)
async def a_prefix_of_older_weights_is_kept_by_name(bench: Bench) -> None:
    """Only keep_prefix_cache=True lets prompts use what older weights cached."""
    engine, other = bench.engine, bench.other_weights()
    await engine.reset_prefix_cache()
    prompt = bench.prompt(LONG_PROMPT)
    await one(bench, prompt)
    await engine.update_named_weights(from_disk(other, keep_prefix_cache=True))
    assert (await one(bench, prompt)).cached_tokens > 0
    await engine.load_weights_from_disk(str(other), "again")
    assert (await one(bench, prompt)).cached_tokens == 0


@case(
    Capability.WEIGHTS_DISK,
    Capability.PREFIX_CACHE,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE,
    Capability.PAUSE_IN_PLACE,
    config={"max_num_seqs": _AT_ONCE},
    changes_weights=True,
    slow=True,
)
async def a_frozen_request_leaves_no_stale_prefix(bench: Bench) -> None:
    """The old cache of a request frozen in place through an update is not used by later requests.

    Nor is it if the request is aborted after the update, nor by requests that waited in the engine through the update,
    nor by the request itself once a pause retracts it.
    """
    for aborted in (False, True) if bench.claims(Capability.ABORT) else (False,):
        first, second = await _prefix_of_a_request_in_flight(bench, PauseMode.IN_PLACE, aborted=aborted)
        assert first.cached_tokens == 0, f"{first.cached_tokens} tokens were found that older weights had cached"
        check_made_by(bench, [first, second], bench.other_weights())
    await _waits_for_frozen_requests(bench)
    if bench.claims(Capability.PAUSE_RETRACT) and bench.claims(Capability.LOGPROBS_RAW):
        await _is_retracted_after_it_was_frozen(bench)


@case(
    Capability.WEIGHTS_DISK,
    Capability.PREFIX_CACHE,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.PAUSE_RETRACT,
    changes_weights=True,
)
async def a_retracted_request_leaves_no_stale_prefix(bench: Bench) -> None:
    """The prefix that later requests share with one retracted for an update was computed by the new weights."""
    completions = await _prefix_of_a_request_in_flight(bench, PauseMode.RETRACT)
    check_made_by(bench, completions, bench.other_weights())


async def _prefix_of_a_request_in_flight(
    bench: Bench, mode: PauseMode, *, aborted: bool = False
) -> tuple[Completion, Completion]:
    """Update in ``mode`` while a request with a long prompt runs; once it has ended, ask for its prompt twice.

    Check that the prefix of a request that had ended before is not found either.

    Args:
        bench: The workplace.
        mode: The update's mode.
        aborted: Abort the request right after the update.
    """
    engine = bench.engine
    if engine.get_weight_version() == NEW:  # of an earlier round
        await engine.load_weights_from_disk(str(bench.model), "before")
    await engine.reset_prefix_cache()
    prompt, ended = bench.prompt(LONG_PROMPT), bench.prompt(LONG_PROMPT)
    await one(bench, ended)
    async with bench.in_flight([prompt], bench.long(TOKENS, prompt_length=LONG_PROMPT)) as running:
        await engine.load_weights_from_disk(str(bench.other_weights()), NEW, mode=mode)
        if running.done():
            raise TooLate("the request ended before the update, so this shows nothing")
        if aborted:
            await engine.abort_generation()
        await running
    await until_idle(engine)
    again = await one(bench, ended)
    assert again.cached_tokens == 0, f"{again.cached_tokens} tokens were found that older weights had cached"
    check_made_by(bench, [again], bench.other_weights())
    return await one(bench, prompt), await one(bench, prompt)


async def _waits_for_frozen_requests(bench: Bench) -> None:
    """Update while requests are frozen in place, and others with their prompt wait in the engine for their end."""
    engine, prompt = bench.engine, bench.prompt(LONG_PROMPT)
    await engine.load_weights_from_disk(str(bench.model), "before")
    params = bench.long(TOKENS, prompt_length=LONG_PROMPT)
    async with bench.in_flight([prompt] * _AT_ONCE, params, tokens=0) as running:
        waiting = asyncio.create_task(engine.generate([prompt] * _WAITING, {"max_new_tokens": 8, "temperature": 0}))
        try:
            async with within("a request to wait in the engine"):
                while (await engine.stats()).waiting == 0:
                    if running.done():
                        raise TooLate("the requests that run ended before another one waited")
                    await asyncio.sleep(0.002)
            await engine.load_weights_from_disk(str(bench.other_weights()), NEW, mode=PauseMode.IN_PLACE)
            if running.done():
                raise TooLate("the requests ended before the update, so this shows nothing")
            output = await result_of(waiting)
        finally:
            await end_requests(engine, waiting)
    found = [completion for completion in output.completions if completion.weight_version == NEW]
    assert found, "no request waited through the update"
    fewest = min(completion.cached_tokens for completion in found)
    assert fewest == 0, f"{fewest} tokens were found that older weights had cached"
    check_made_by(bench, found, bench.other_weights())


async def _is_retracted_after_it_was_frozen(bench: Bench) -> None:
    """Let a pause retract a request that an update froze in place: the new weights read its prompt again."""
    engine, other = bench.engine, bench.other_weights()
    await engine.load_weights_from_disk(str(bench.model), "before")
    params = bench.long(TOKENS, prompt_length=LONG_PROMPT, logprobs=0, logprobs_mode="raw")
    async with bench.in_flight([bench.prompt(LONG_PROMPT)], params) as running:
        await engine.load_weights_from_disk(str(other), NEW, mode=PauseMode.IN_PLACE)
        await engine.pause_generation(PauseMode.RETRACT)
        await check_held(engine, running)
        await engine.continue_generation()
        (completion,) = (await running).completions
    last = len(completion.token_ids)
    check_logprobs(bench, completion, other, VersionSpan(NEW, last - 1, last))
