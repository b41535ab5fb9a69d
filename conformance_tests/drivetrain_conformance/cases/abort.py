"""Ending requests early: by their ids, all at once, or by cancelling the call."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import CompletionChunk, FinishReason, VersionSpan
from drivetrain.types.sampling import JsonSchema, LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_prefix, check_same
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, end_requests, in_time, until_idle, until_running
from drivetrain_conformance.harness.time_limits import within

NOBODY: Final = "an id that no request has"
TOKENS: Final = 250
"""Length of a request that is in flight for a while and whose end the case awaits."""
_WORDS: Final = 1000
"""Values of a schema that takes some tenths of a second to compile."""


@case(Capability.ABORT)
async def one_of_several_ends_and_the_others_go_on(bench: Bench) -> None:
    """A request aborted by its id returns the first tokens of its uninterrupted run; other requests are unaffected."""
    engine = bench.engine
    await engine.abort(NOBODY)
    prompts, params = bench.prompts(3), bench.long(TOKENS)
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params, request_ids=["a", "b", "c"]) as task:
        await engine.abort("b")
        async with within():
            first, aborted, last = (await task).completions
    with in_time(aborted):
        assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.matched_stop is None
    assert 0 < len(aborted.token_ids) < len(whole[1].token_ids)
    check_prefix(bench, aborted, whole[1])
    check_same(bench, [first, last], [whole[0], whole[2]])


@case(Capability.ABORT)
async def an_id_that_begins_another_aborts_only_its_own(bench: Bench) -> None:
    """Aborting req-1 leaves req-10 and req-1x alone; an invalid id is refused and ends nothing."""
    engine = bench.engine
    await engine.abort(NOBODY)
    prompts, ids = bench.prompts(4), ["req-1", "req-10", "req-1x", "req-"]
    no_ids: tuple[Any, ...] = (None, "", 3, ["req-1"])
    async with bench.in_flight(prompts, bench.long(TOKENS), request_ids=ids) as task:
        for no_id in no_ids:
            with refused(InvalidRequest, field="request_id", otherwise=f"abort({no_id!r}) was taken"):
                await engine.abort(no_id)
        await engine.abort("req-1")
        async with within():
            completions = (await task).completions
    reasons = [completion.finish_reason for completion in completions]
    ended = [request_id for request_id, reason in zip(ids, reasons, strict=True) if reason is FinishReason.ABORT]
    assert ended in ([], ["req-1"]), f"aborting 'req-1' ended others: {ended}"
    with in_time(completions[0]):
        assert ended, "aborting 'req-1' did not end it"


@case(Capability.ABORT)
async def a_prompts_samples_end_together_or_one_by_one(bench: Bench) -> None:
    """A prompt's id aborts all of its samples; a sample's id aborts only that sample."""
    engine = bench.engine
    await engine.abort(NOBODY)
    prompt = bench.prompt()
    async with bench.in_flight([prompt], bench.long(TOKENS, n=3), request_ids=["group"]) as task:
        await engine.abort("group")
        async with within():
            samples = (await task).completions
    with in_time(*samples):
        assert [sample.finish_reason for sample in samples] == [FinishReason.ABORT] * 3
    one = samples[1].request_id
    async with bench.in_flight([prompt], bench.long(TOKENS, n=3), request_ids=["group"]) as task:
        await engine.abort(one)
        async with within():
            samples = (await task).completions
    ended = [sample.request_id for sample in samples if sample.finish_reason is FinishReason.ABORT]
    assert ended in ([], [one]), f"aborting the sample {one!r} ended {ended}"
    with in_time(samples[1]):
        assert ended, f"aborting the sample {one!r} did not end it"


@case(Capability.ABORT)
async def all_end_and_new_requests_are_served(bench: Bench) -> None:
    """abort_generation() ends every request, including queued ones, and later answers are unchanged."""
    engine = bench.engine
    await engine.abort_generation()
    prompts = bench.prompts(4)
    before = await bench.greedy(prompts)
    many = prompts * 75  # more than engines commonly run at once
    task = await until_running(engine, 1, lambda: engine.generate(many, bench.long()))
    try:
        await engine.abort_generation()
        async with within():
            ended = (await task).completions
    finally:
        await end_requests(engine, task)
    others = {completion.finish_reason for completion in ended} - {FinishReason.ABORT}
    with in_time(*ended):
        assert not others, f"of {len(many)} requests some ended by {others}"
    await until_idle(engine)
    check_same(bench, await bench.greedy(prompts), before)


# An engine with priorities has a queue, and max_num_seqs makes requests wait in it.
@case(Capability.ABORT, Capability.PRIORITY, config={"max_num_seqs": 1})
async def what_waits_its_turn_can_be_aborted(bench: Bench) -> None:
    """In an engine that runs one request at a time, waiting requests abort without a token, by id and all at once.

    A request that waits while the weights get a new label carries only the new one.
    """
    engine = bench.engine
    await engine.generate(bench.prompt(), SamplingParams(max_new_tokens=1), priority=1)
    await engine.abort(NOBODY)
    prompts = bench.prompts(3)
    before = await bench.greedy(prompts)
    async with bench.in_flight(prompts[:1], bench.long(), tokens=0) as running:
        waiting = [
            asyncio.create_task(engine.generate(prompt, bench.long(), request_ids=[request_id]))
            for prompt, request_id in zip(prompts[1:], ("second", "third"), strict=True)
        ]
        try:
            async with within():
                while (await engine.stats()).waiting < 2:
                    if running.done():
                        raise TooLate("the request that runs ended before the others had come")
                    await asyncio.sleep(0.002)
                await engine.abort("second")
                ended = (await waiting[0]).completions
                with in_time(running):
                    assert not running.done()
                    assert not waiting[1].done()
                await engine.abort_generation()
                ended += (await waiting[1]).completions
                (stopped,) = (await running).completions
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    assert [(completion.finish_reason, completion.token_ids) for completion in ended] == [(FinishReason.ABORT, [])] * 2
    with in_time(stopped):
        assert stopped.finish_reason is FinishReason.ABORT
    check_same(bench, await bench.greedy(prompts), before)
    if bench.claims(Capability.VERSION_SPANS):
        await _waits_for_a_new_label(bench)


async def _waits_for_a_new_label(bench: Bench) -> None:
    """Change the label while one request runs and another waits; check the label of the one that waited."""
    engine = bench.engine
    version = engine.get_weight_version()
    long, short = bench.long(), SamplingParams(max_new_tokens=4, temperature=0)
    calls = [asyncio.create_task(engine.generate(bench.prompt(), long, request_ids=["first"]))]
    try:
        async with within():
            while not (await engine.stats()).running:
                if calls[0].done():
                    break
                await asyncio.sleep(0.002)
            calls.append(asyncio.create_task(engine.generate(bench.prompt(), short)))
            while not (await engine.stats()).waiting:
                if calls[0].done():
                    break
                await asyncio.sleep(0.002)
            await engine.update_weight_version("renamed")
            await asyncio.sleep(0.02)  # let the first make tokens under the new label
            await engine.abort("first")
            (first,), (second,) = [(await call).completions for call in calls]
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await engine.update_weight_version(version)
    spans = [span.version for span in second.weight_versions]
    # Otherwise the first had ended before, and the second had begun.
    if first.weight_versions[-1:] and first.weight_versions[-1].version == "renamed":
        assert spans == ["renamed"], f"it began after the weights were renamed, and its labels are {spans}"


@case(Capability.ABORT)
async def ids_that_are_not_running_are_passed_over(bench: Bench) -> None:
    """Aborting an unknown, finished or aborted id is no error and changes nothing; the id can be used again."""
    engine = bench.engine
    await engine.abort(NOBODY)
    await engine.abort_generation()
    prompt = bench.prompt()
    params = bench.long(8)
    first = (await engine.generate(prompt, params, request_ids=["once"])).completions
    await engine.abort("once")
    again = (await engine.generate(prompt, params, request_ids=["once"])).completions
    check_same(bench, again, first)
    async with bench.in_flight([prompt], bench.long(), request_ids=["once"]) as task:
        await engine.abort(NOBODY)
        await engine.abort("once")
        await engine.abort("once")
        async with within():
            (completion,) = (await task).completions
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT
    await engine.abort("once")
    check_same(bench, (await engine.generate(prompt, params, request_ids=["once"])).completions, first)


@case(Capability.ABORT, Capability.STREAMING)
async def a_stream_ends_with_its_completion(bench: Bench) -> None:
    """An aborted stream ends with a completion, marked aborted, of exactly the tokens that were streamed."""
    engine = bench.engine
    await engine.abort(NOBODY)
    prompts = bench.prompts(2)
    params = bench.long(TOKENS)
    whole = (await engine.generate(prompts, params)).completions
    chunks: list[CompletionChunk] = []
    shown = 0
    async with within():
        async for chunk in engine.generate_stream(prompts, params, request_ids=["goes", "stays"]):
            chunks.append(chunk)
            before, shown = shown, shown + len(chunk.token_ids) * (chunk.prompt_index == 0)
            if before < 5 <= shown:
                await engine.abort("goes")
    for index, reason in enumerate((FinishReason.ABORT, whole[1].finish_reason)):
        own = [chunk for chunk in chunks if chunk.prompt_index == index]
        assert [chunk.completion is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        completion = own[-1].completion
        assert completion is not None
        with in_time(completion):
            assert completion.finish_reason is reason
        assert [token for chunk in own for token in chunk.token_ids] == completion.token_ids
        assert "".join(chunk.text for chunk in own) == completion.text
        check_prefix(bench, completion, whole[index])


@case(Capability.ABORT)
async def an_abort_right_after_submission_is_not_lost(bench: Bench) -> None:
    """A request that is aborted right after its submission comes back aborted, also while its grammar is compiled."""
    engine = bench.engine
    await engine.abort(NOBODY)
    prompt = bench.prompt()
    for turns in range(1, 9):
        request_id = f"turn-{turns}"
        task = asyncio.create_task(engine.generate(prompt, bench.long(), request_ids=[request_id]))
        for _ in range(turns):
            await asyncio.sleep(0)
        try:
            await engine.abort(request_id)
            async with within():
                (completion,) = (await task).completions
        finally:
            await end_requests(engine, task)
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT, (
                f"aborted {turns} turns of the event loop after it was submitted, it made {len(completion.token_ids)} "
                f"tokens and ended by {completion.finish_reason.value}"
            )
    if bench.claims(Capability.STRUCTURED_JSON):
        await _check_an_abort_while_a_grammar_is_compiled(bench)


async def _check_an_abort_while_a_grammar_is_compiled(bench: Bench) -> None:
    """Abort a request once the backend has it, whose grammar takes a while to compile and has long answers only."""
    engine = bench.engine
    # Engines keep grammars, so that each attempt needs another.
    words = [f"{bench.rng.random()}-{bench.attempt}-{word}" for word in range(_WORDS)]
    schema = json.dumps({"type": "array", "items": {"enum": words}, "minItems": 100})
    params = bench.long(structured_output=JsonSchema(json_schema=schema), ignore_eos=False)
    task = asyncio.create_task(engine.generate(bench.prompt(), params, request_ids=["compiled"]))
    try:
        async with within():
            while not task.done() and not engine.parts.in_flight.running:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            await engine.abort("compiled")
            (completion,) = (await task).completions
    finally:
        await end_requests(engine, task)
    with in_time(completion):
        assert completion.finish_reason is FinishReason.ABORT, (
            f"aborted while its grammar was compiled, it made {len(completion.token_ids)} tokens and ended by "
            f"{completion.finish_reason.value}"
        )


@case(Capability.ABORT, Capability.LOGPROBS_RAW)
async def logprobs_of_an_aborted_request_belong_to_its_tokens(bench: Bench) -> None:
    """An aborted completion has one logprob for each token, the same as in its uninterrupted run."""
    engine = bench.engine
    await engine.abort(NOBODY)
    prompts, params = bench.prompts(2), bench.long(TOKENS, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params) as task:
        await engine.abort_generation()
        async with within():
            aborted = (await task).completions
    for part, complete in zip(aborted, whole, strict=True):
        with in_time(part):
            assert part.finish_reason is FinishReason.ABORT
        assert part.token_ids
        assert part.logprobs is not None
        check_prefix(bench, part, complete)


@case(Capability.ABORT, Capability.VERSION_SPANS)
async def versions_of_an_aborted_request_cover_its_tokens(bench: Bench) -> None:
    """An aborted completion's version spans cover exactly its tokens."""
    engine = bench.engine
    await engine.abort(NOBODY)
    own = engine.get_weight_version()
    await engine.update_weight_version("a label")
    try:
        async with bench.in_flight(bench.prompts(2), bench.long()) as task:
            await engine.abort_generation()
            async with within():
                aborted = (await task).completions
    finally:
        await engine.update_weight_version(own)
    for completion in aborted:
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT
        assert completion.weight_versions == (VersionSpan("a label", 0, len(completion.token_ids)),)


@case()
async def a_cancelled_call_leaves_nothing_running(bench: Bench) -> None:
    """Cancelling a call ends its requests in the engine and frees their ids; later answers are unchanged."""
    engine = bench.engine
    prompts, ids = bench.prompts(4), ["w", "x", "y", "z"]
    before = await bench.greedy(prompts)
    for seconds in (0.0, 0.0, 0.01, 0.05):
        task = asyncio.create_task(engine.generate(prompts, bench.long(), request_ids=ids))
        await asyncio.sleep(seconds)
        task.cancel()
        async with within():
            await asyncio.wait([task])
        await until_idle(engine)
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.STREAMING)
async def a_stream_that_is_left_early_leaves_nothing_running(bench: Bench) -> None:
    """Closing a stream early ends its requests in the engine and frees their ids; later answers are unchanged."""
    engine = bench.engine
    prompts, ids = bench.prompts(3), ["x", "y", "z"]
    before = await bench.greedy(prompts)
    for chunks in range(3):
        stream = engine.generate_stream(prompts, bench.long(), request_ids=ids)
        async with within():
            for _ in range(chunks):
                await anext(stream)
            await stream.aclose()
        await until_idle(engine)
    stream = engine.generate_stream(prompts[0], bench.long(2), request_ids=ids[:1])
    async with within():
        last = [chunk async for chunk in stream][-1]
    assert last.completion is not None
    check_same(bench, await bench.greedy(prompts), before)
