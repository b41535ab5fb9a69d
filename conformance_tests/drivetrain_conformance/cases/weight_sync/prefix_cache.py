"""Prefixes of older weights."""

from __future__ import annotations

from typing import Final

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion
from drivetrain_conformance.assertions.weight_checks import check_made_by
from drivetrain_conformance.assets.weight_sources import from_disk
from drivetrain_conformance.cases.weight_sync.checks import NEW, TOKENS, one
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, until_idle

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
    changes_weights=True,
)
async def a_frozen_request_leaves_no_stale_prefix(bench: Bench) -> None:
    """The old cache of a request frozen in place through an update is not used by later requests.

    Nor is it if the request is aborted after the update.
    """
    for aborted in (False, True) if bench.claims(Capability.ABORT) else (False,):
        first, second = await _prefix_of_a_request_in_flight(bench, PauseMode.IN_PLACE, aborted=aborted)
        assert first.cached_tokens == 0, f"{first.cached_tokens} tokens were found that older weights had cached"
        check_made_by(bench, [first, second], bench.other_weights())


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
