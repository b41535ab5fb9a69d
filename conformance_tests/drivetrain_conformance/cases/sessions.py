"""The prefix cache, and sessions whose turns share it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.memory_use import check_steady
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.engine_model.field_batches import field_batch
from drivetrain_conformance.engine_model.mixed_fields import Repeats, check_honoured
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, until_idle

_GREEDY: Final = SamplingParams(max_new_tokens=8, temperature=0)
_LONG: Final = 400
"""Longer than one block of any engine's cache (up to 128 tokens), and than two blocks of most."""
_FIELDS: Final = 160
"""Tokens of prompts that are cached before every field is set."""
_BLOCK: Final = 16
_BLOCKS: Final = 384
"""Tokens that fill whole blocks of any engine's cache."""


# Prefix cache -----------------------------------------------------------------------------------------------------


@case(Capability.PREFIX_CACHE)
async def a_prompt_is_found_again(bench: Bench) -> None:
    """The second request with a long prompt finds it in the cache, and is answered like the first.

    So it is whatever fields the second request sets, those that count the prompt's tokens included.
    """
    prompt = _prompt(bench)
    await bench.engine.reset_prefix_cache()
    first, second = await _ask(bench, prompt), await _ask(bench, prompt)
    assert first.cached_tokens == 0, "a prompt that was never seen was found in the cache"
    assert len(prompt) // 2 <= second.cached_tokens < len(prompt), f"{second.cached_tokens} tokens were found again"
    check_same(bench, [second], [first])
    await _check_fields_hold(bench)


async def _check_fields_hold(bench: Bench) -> None:
    """Check that every field has its effect on a request whose prompt is cached."""
    batch = field_batch(bench, min(_FIELDS, bench.engine.model_info.context_length // 2))
    prompts = [list(bench.engine.tokenizer.encode(prompt)) for prompt in batch.prompts]
    await bench.engine.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0))
    found = (await bench.engine.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0))).completions
    missing = [completion.prompt_index for completion in found if not completion.cached_tokens]
    assert not missing, f"prompts {missing} of {len(prompts)} were not found again"
    await check_honoured(bench, batch, Repeats(), streamed=False)


@case(Capability.PREFIX_CACHE)
async def a_reset_forgets_every_prefix(bench: Bench) -> None:
    """After reset_prefix_cache() a prompt is not found, is answered as before, and is found from then on."""
    prompts = [_prompt(bench), _prompt(bench)]
    before = [await _ask(bench, prompt) for prompt in prompts]
    await bench.engine.reset_prefix_cache()
    for prompt, one in zip(prompts, before, strict=True):
        after = await _ask(bench, prompt)
        assert after.cached_tokens == 0
        check_same(bench, [after], [one])
        assert (await _ask(bench, prompt)).cached_tokens > 0


@case(Capability.PREFIX_CACHE)
async def a_reset_of_an_empty_cache_is_harmless(bench: Bench) -> None:
    """reset_prefix_cache() may be called repeatedly; afterwards nothing is found, and nothing is broken."""
    prompt = _prompt(bench)
    for _ in range(3):
        await bench.engine.reset_prefix_cache()
    first = await _ask(bench, prompt)
    assert first.cached_tokens == 0
    check_same(bench, [await _ask(bench, prompt)], [first])


@case(Capability.PREFIX_CACHE)
async def only_what_two_prompts_share_is_found(bench: Bench) -> None:
    """A prompt that begins like an earlier one finds at most the common prefix, and is answered correctly."""
    prompt = _prompt(bench)
    await bench.engine.reset_prefix_cache()
    await _ask(bench, prompt)
    shared = len(prompt) * 3 // 4
    other = [*prompt[:shared], *bench.prompt(len(prompt) - shared)]
    other[shared] = next(token for token in bench.prompt(64) if token != prompt[shared])
    found = await _ask(bench, other)
    assert 0 < found.cached_tokens <= shared
    elsewhere = [next(token for token in bench.prompt(64) if token != prompt[0]), *prompt[1:]]
    assert (await _ask(bench, elsewhere)).cached_tokens == 0, "a prompt that begins otherwise was found"
    await bench.engine.reset_prefix_cache()
    check_same(bench, [found], [await _ask(bench, other)])


@case(Capability.PREFIX_CACHE)
async def an_answer_is_found_with_its_prompt(bench: Bench) -> None:
    """A prompt that continues an answer finds the earlier turn, and is answered as without a cache."""
    prompt = _prompt(bench)
    await bench.engine.reset_prefix_cache()
    first = await _ask(bench, prompt)
    turn = [*prompt, *first.token_ids, *bench.prompt(5)]
    second = await _ask(bench, turn)
    assert second.cached_tokens >= len(prompt) // 2
    await bench.engine.reset_prefix_cache()
    check_same(bench, [second], [await _ask(bench, turn)])
    if bench.claims(Capability.LOGPROBS_RAW):
        await _check_ends_of_blocks(bench)


async def _check_ends_of_blocks(bench: Bench) -> None:
    """Check turns after an answer that ends with a block of the cache, or beside it: its last token was never run."""
    end = min(_BLOCKS, bench.engine.model_info.context_length // 2 // _BLOCK * _BLOCK)
    for length in (end - 1, end, end + 1):
        first = await _ask(bench, bench.prompt(length - (_GREEDY.max_new_tokens or 0)))
        turn = [*first.prompt_token_ids, *first.token_ids, *bench.prompt(5)]
        found = await _first_logprob(bench, turn)
        await bench.engine.reset_prefix_cache()
        alone = await _first_logprob(bench, turn)
        assert abs(found - alone) <= bench.tolerance(), (
            f"after an answer that ends at token {length} the next turn's first logprob is {found:.4f}, and without "
            f"the cache {alone:.4f}"
        )


async def _first_logprob(bench: Bench, prompt: list[int]) -> float:
    params = _GREEDY.model_copy(update={"logprobs": 0, "logprobs_mode": LogprobsMode.RAW})
    (completion,) = (await bench.engine.generate(prompt, params)).completions
    assert completion.logprobs
    return completion.logprobs[0]


@case(Capability.PREFIX_CACHE)
async def samples_share_a_cached_prompt(bench: Bench) -> None:
    """Each of several samples of a cached prompt, in a batch with others, reports cached tokens and is correct."""
    prompt, others = _prompt(bench), bench.prompts(3)
    await bench.engine.reset_prefix_cache()
    alone = [await _ask(bench, one) for one in (prompt, *others)]
    together = (await bench.engine.generate([prompt, *others], _GREEDY.model_copy(update={"n": 2}))).by_prompt()
    for samples, one in zip(together, alone, strict=True):
        check_same(bench, samples, [one, one])
    assert all(sample.cached_tokens > 0 for sample in together[0])


@case(Capability.PREFIX_CACHE, own_engine=True, slow=True)
async def without_prefix_caching_nothing_is_found(bench: Bench) -> None:
    """With enable_prefix_caching=False no prompt is ever found, and it is answered as with the cache.

    Nor is a prompt kept: the KV cache does not grow with prompts that were answered.
    """
    async with bench.open() as engine:
        prompt = bench.prompt(min(_LONG, engine.model_info.context_length // 2), engine)
        await engine.reset_prefix_cache()
        (with_cache,) = (await engine.generate(prompt, _GREEDY)).completions
    async with bench.open(enable_prefix_caching=False) as engine:
        answers = [(await engine.generate(prompt, _GREEDY)).completions[0] for _ in range(2)]
        assert [one.cached_tokens for one in answers] == [0, 0]
        check_same(bench, answers, [with_cache, with_cache], engine)

        async def held_after_another() -> dict[str, int]:
            await engine.generate(bench.prompt(len(prompt), engine), _GREEDY)
            await until_idle(engine)
            return {"bytes of KV cache": (await engine.stats()).kv_cache_bytes}

        await check_steady(held_after_another, {"bytes of KV cache": 0}, "a prompt that is asked for once")


@case(Capability.HICACHE_STORAGE, Capability.PREFIX_CACHE)
async def clearing_the_storage_tier_forgets_it(bench: Bench) -> None:
    """After clear_hicache_storage() and reset_prefix_cache() a prompt is found nowhere, and answered as before."""
    prompt = _prompt(bench)
    before = await _ask(bench, prompt)
    await bench.engine.clear_hicache_storage()
    await bench.engine.reset_prefix_cache()
    after = await _ask(bench, prompt)
    assert after.cached_tokens == 0
    check_same(bench, [after], [before])
    await bench.engine.clear_hicache_storage()
    check_same(bench, [await _ask(bench, prompt)], [before])


# Sessions ---------------------------------------------------------------------------------------------------------
#
# A turn's prompt is only its new part: the model sees the parent turn, the parent's answer, and then the prompt.


@case(Capability.SESSIONS)
async def a_turn_goes_on_from_the_last(bench: Bench) -> None:
    """A later turn is answered like a prompt with all earlier turns, and reports how much of it was cached."""
    async with _session(bench) as session:
        opening, reply, more = _prompt(bench), bench.prompt(7), bench.prompt(4)
        first = await _turn(bench, session, opening)
        second = await _turn(bench, session, reply, parent=first.request_id)
        third = await _turn(bench, session, more, parent=second.request_id)
    seen = [*opening, *first.token_ids, *reply]
    assert min(second.cached_tokens, third.cached_tokens) >= len(opening) // 2, "an earlier turn was computed again"
    await _assert_answers(bench, first, opening)
    await _assert_answers(bench, second, seen)
    await _assert_answers(bench, third, [*seen, *second.token_ids, *more])


@case(Capability.SESSIONS)
async def turns_branch_from_any_earlier_one(bench: Bench) -> None:
    """Several turns branch from one; none sees another's, and each can be continued."""
    async with _session(bench) as session:
        opening = _prompt(bench)
        first = await _turn(bench, session, opening)
        seen = [*opening, *first.token_ids]
        replies = bench.prompts(3, length=5)
        branches = [
            await _turn(bench, session, reply, parent=first.request_id, turn=TurnMode.BRANCH) for reply in replies
        ]
        more = bench.prompt(4)
        later = await _turn(bench, session, more, parent=branches[0].request_id)
    for branch, reply in zip(branches, replies, strict=True):
        await _assert_answers(bench, branch, [*seen, *reply])
        assert branch.cached_tokens >= len(opening) // 2
    await _assert_answers(bench, later, [*seen, *replies[0], *branches[0].token_ids, *more])


@case(Capability.SESSIONS)
async def a_turn_replaces_what_followed_another(bench: Bench) -> None:
    """A turn in mode REPLACE builds on its parent; the turns that had followed the parent can no longer be named."""
    async with _session(bench) as session:
        opening = _prompt(bench)
        first = await _turn(bench, session, opening)
        seen = [*opening, *first.token_ids]
        dropped = await _turn(bench, session, bench.prompt(5), parent=first.request_id)
        after = await _turn(bench, session, bench.prompt(3), parent=dropped.request_id)
        last = await _turn(bench, session, bench.prompt(3), parent=after.request_id)
        reply, more = bench.prompt(5), bench.prompt(4)
        instead = await _turn(bench, session, reply, parent=first.request_id, turn=TurnMode.REPLACE)
        for gone in (dropped, after, last):
            with refused(InvalidRequest, otherwise="a turn goes on from one that was discarded"):
                await _turn(bench, session, more, parent=gone.request_id)
        later = await _turn(bench, session, more, parent=instead.request_id)
    await _assert_answers(bench, instead, [*seen, *reply])
    await _assert_answers(bench, later, [*seen, *reply, *instead.token_ids, *more])


@case(Capability.SESSIONS)
async def sessions_do_not_see_each_other(bench: Bench) -> None:
    """Two open sessions continue from their own turns, and requests outside of them see neither."""
    async with _session(bench) as one, _session(bench) as other:
        assert one != other
        openings, replies = [_prompt(bench), _prompt(bench)], bench.prompts(2)
        firsts = [await _turn(bench, session, ids) for session, ids in zip((one, other), openings, strict=True)]
        seconds = [
            await _turn(bench, session, reply, parent=first.request_id)
            for session, reply, first in zip((one, other), replies, firsts, strict=True)
        ]
        outside = await _ask(bench, replies[0])
    for opening, first, reply, second in zip(openings, firsts, replies, seconds, strict=True):
        await _assert_answers(bench, second, [*opening, *first.token_ids, *reply])
    check_same(bench, [outside], [await _ask(bench, replies[0])])


@case(Capability.SESSIONS)
async def a_session_has_the_id_that_it_was_given(bench: Bench) -> None:
    """open_session() takes an id that is not in use; after closing, the same id opens an empty session."""
    session = await bench.engine.open_session(4096, session_id="rollout-1")
    assert session == "rollout-1"
    with refused(InvalidRequest, field="session_id", naming="rollout-1"):
        await bench.engine.open_session(4096, session_id="rollout-1")
    await _turn(bench, session, bench.prompt())
    await bench.engine.close_session(session)
    assert await bench.engine.open_session(4096, session_id="rollout-1") == session
    prompt = bench.prompt()
    fresh = await _turn(bench, session, prompt)
    await bench.engine.close_session(session)
    await _assert_answers(bench, fresh, prompt)


@case(Capability.SESSIONS)
async def an_unknown_session_is_refused(bench: Bench) -> None:
    """Turns in an unknown or closed session, and closing such a session, are refused with an error that names it."""
    async with _session(bench) as closed:
        first = await _turn(bench, closed, bench.prompt())
    for session in ("no-such-session", closed):
        with refused(InvalidRequest, field="session_id", naming=session):
            await _turn(bench, session, bench.prompt())
        with refused(InvalidRequest, field="session_id", naming=session):
            await bench.engine.close_session(session)
    with refused(InvalidRequest, field="session_id"):
        await _turn(bench, closed, bench.prompt(), parent=first.request_id)


@case(Capability.SESSIONS)
async def an_unknown_turn_is_refused(bench: Bench) -> None:
    """A turn whose parent is unknown to the session is refused; the session goes on."""
    async with _session(bench) as session, _session(bench) as other:
        opening, reply = bench.prompt(), bench.prompt()
        first = await _turn(bench, session, opening)
        foreign = await _turn(bench, other, bench.prompt())
        for parent in ("no-such-turn", foreign.request_id):
            for mode in TurnMode:
                with refused(InvalidRequest):
                    await _turn(bench, session, bench.prompt(), parent=parent, turn=mode)
        second = await _turn(bench, session, reply, parent=first.request_id)
    await _assert_answers(bench, second, [*opening, *first.token_ids, *reply])


@case(Capability.SESSIONS)
async def a_capacity_that_cannot_be_is_refused(bench: Bench) -> None:
    """A session's capacity must be at least one token."""
    await bench.engine.close_session(await bench.engine.open_session(1))
    for capacity in (0, -1):
        with refused(InvalidRequest, field="capacity"):
            await bench.engine.open_session(capacity)


# ------------------------------------------------------------------------------------------------------------------


def _prompt(bench: Bench) -> list[int]:
    return bench.prompt(min(_LONG, bench.engine.model_info.context_length // 2))


async def _ask(bench: Bench, prompt: list[int]) -> Completion:
    return (await bench.engine.generate(prompt, _GREEDY)).completions[0]


@asynccontextmanager
async def _session(bench: Bench) -> AsyncGenerator[str, None]:
    session = await bench.engine.open_session(bench.engine.model_info.context_length)
    try:
        yield session
    finally:
        await bench.engine.close_session(session)


async def _turn(
    bench: Bench,
    session: str,
    prompt: list[int],
    *,
    parent: str | None = None,
    turn: TurnMode = TurnMode.CONTINUE,
) -> Completion:
    output = await bench.engine.generate_with_session(session, prompt, _GREEDY, parent_request_id=parent, turn=turn)
    return output.completions[0]


async def _assert_answers(bench: Bench, turn: Completion, seen: list[int]) -> None:
    """Assert that a turn was answered as the prompt ``seen`` is outside any session."""
    assert turn.prompt_token_ids == seen, "the prompt of a completion is what the model saw"
    check_same(bench, [turn], [await _ask(bench, seen)])
