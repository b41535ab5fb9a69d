"""Streams: the same completions as from generate(), piece by piece, and nothing shown is taken back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DeadlineExceeded
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, CompletionChunk, FinishReason
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.common_checks import agrees_with_reference, assert_idle_soon, ending_prompt
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assertions.stop_texts import (
    TOKENS,
    Fields,
    expressions,
    free_samples,
    letter_ids,
    pieces,
    samples_of_spanning_characters,
    stop_params,
)
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.random_property import random_property
from drivetrain_conformance.harness.testbench import Bench, check_held, in_time
from drivetrain_conformance.harness.time_limits import until_ended, within
from drivetrain_conformance.references.reference_stops import Ending

_PATIENCE: Final = 0.3
"""A timeout, in seconds, long enough for a few tokens and too short for many."""
_LOOKS: Final = 6
"""Streams that are looked at after their first chunk; on a busy machine one may have ended by then."""
_CHUNKS_BEFORE_THE_CLOCK: Final = 5
"""Chunks that a stream may still show after its timeout, because they lay ready while the event loop stood still."""
_STREAMS: Final = 6
"""Streams that are frozen together, or fewer if the engine runs fewer at once. Each begins after the one before, so
that an engine that shows tokens in groups has shown all tokens of all of them only by chance."""
_STEPS_OF_A_QUEUE: Final = 30
"""Looks in a row, a step or more apart, at which a request waits before it counts as waiting for another to end."""
_WAITS: Final = (0.1, 1.0, 15.0)
"""Seconds, by attempt, that a frozen engine has to send its last tokens. One good attempt is enough."""


@dataclass(slots=True)
class Heard:
    """The chunks that a listener received of one sample."""

    chunks: list[CompletionChunk] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    @property
    def completion(self) -> Completion:
        """The completion on the last chunk."""
        assert self.chunks[-1].completion is not None, "the stream ended without the completion"
        return self.chunks[-1].completion


# The chunks and the completion ---------------------------------------------------------------------------------------


@case(Capability.STREAMING)
async def the_chunks_are_the_completion(bench: Bench) -> None:
    """The chunks of each sample concatenate to exactly the ids and text of the completion on its last chunk."""
    params = SamplingParams(n=2, max_new_tokens=TOKENS)
    heard = await _listen(bench, bench.prompts(4), params)
    assert {key: sample.completion.sample_index for key, sample in heard.items()} == {
        (prompt, sample): sample for prompt in range(4) for sample in range(2)
    }
    for sample in heard.values():
        if sample.completion.finish_reason is FinishReason.LENGTH:
            assert sample.completion.text == bench.engine.decode(sample.token_ids)
            assert len(sample.token_ids) == TOKENS


@case(Capability.STREAMING)
async def a_stream_equals_generate(bench: Bench) -> None:
    """A greedy stream ends in the completions that generate() returns."""
    prompts = bench.prompts(6)
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS)
    whole = (await bench.engine.generate(prompts, params)).completions
    heard = await _listen(bench, prompts, params)
    streamed = [heard[index, 0].completion for index in range(6)]
    check_same(bench, streamed, whole)
    for one, other in zip(streamed, whole, strict=True):
        if one.token_ids == other.token_ids:
            assert Ending.of(one) == Ending.of(other)
        assert one.prompt_token_ids == other.prompt_token_ids
    await _check_fields_are_alike(bench)


async def _check_fields_are_alike(bench: Bench) -> None:
    """Check that a streamed completion has what a whole one has beside its tokens: cached tokens, scores, versions."""
    prompts = bench.prompts(2, min(200, bench.engine.model_info.context_length // 2))
    greedy = SamplingParams(temperature=0, max_new_tokens=4)
    await bench.engine.generate(prompts, greedy)  # fills the prefix cache
    score = 1 if bench.claims(Capability.PROMPT_LOGPROBS) else None
    for params in (greedy, greedy.model_copy(update={"prompt_logprobs": score})):
        whole = (await bench.engine.generate(prompts, params)).completions
        heard = await _listen(bench, prompts, params)
        streamed = [heard[index, 0].completion for index in range(len(prompts))]
        check_same(bench, streamed, whole)
        for one, other in zip(streamed, whole, strict=True):
            assert one.cached_tokens == other.cached_tokens, (
                f"a streamed prompt has {one.cached_tokens} cached tokens, and {other.cached_tokens} without a stream"
            )
            assert [span.version for span in one.weight_versions] == [span.version for span in other.weight_versions]
            scores = zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True)
            off = max((abs((own or 0.0) - (value or 0.0)) for own, value in scores), default=0.0)
            assert off <= 2 * bench.tolerance(), f"a streamed prompt's logprobs are {off:.3g} nats off"


@case(Capability.STREAMING)
async def tokens_come_while_others_are_generated(bench: Bench) -> None:
    """A long completion arrives in many chunks while it is generated, not all at once at the end."""
    params = bench.long(200)
    heard = await _listen(bench, bench.prompts(2), params)
    longest = max(heard.values(), key=lambda sample: len(sample.token_ids))
    assert len(longest.token_ids) > 20, "the completions are too short to come in pieces"
    assert len(longest.chunks) > 3, f"{len(longest.token_ids)} tokens came in {len(longest.chunks)} chunks"
    assert max(len(chunk.token_ids) for chunk in longest.chunks) <= len(longest.token_ids) // 2

    for _ in range(_LOOKS):
        async with aclosing(bench.engine.generate_stream(bench.prompt(), bench.long())) as chunks:
            await anext(chunks)
            if (await bench.engine.stats()).running:
                break
    else:
        raise AssertionError("the first chunk came when all was generated")
    if bench.claims(Capability.ABORT):
        for mode in bench.freezes():
            await _check_frozen_streams_show_every_token(bench, mode)


async def _check_frozen_streams_show_every_token(bench: Bench, mode: PauseMode) -> None:
    """Freeze streams, and check that their listeners then have every token that the engine has.

    An abort returns the rest of a frozen stream. A slow engine may need a while to send its last tokens, so that the
    wait grows from attempt to attempt.
    """
    kept: list[str] = []
    for wait in _WAITS:
        kept = await _kept_while_frozen(bench, mode, wait)
        if not kept:
            return
    raise AssertionError(f"frozen by {mode.value}, streams had tokens that no chunk had shown: {', '.join(kept)}")


async def _kept_while_frozen(bench: Bench, mode: PauseMode, wait: float) -> list[str]:
    """Freeze several streams that differ in length; return what the chunks of some lacked ``wait`` seconds later."""
    engine, heard, readers = bench.engine, [Heard() for _ in range(_STREAMS)], list[asyncio.Task[None]]()
    # Letters: a stream may keep the tokens of a character that is not complete.
    letters = dict.fromkeys(letter_ids(engine, 3), 100.0) if bench.claims(Capability.LOGIT_BIAS) else {}
    params = bench.long(logit_bias=letters)
    try:
        for sample in heard:
            begun = asyncio.Event()
            readers.append(asyncio.create_task(_read(engine, bench.prompt(), params, sample, begun)))
            if not await _begins(engine, begun, heard[0]):
                readers[-1].cancel()
                await asyncio.gather(readers.pop(), return_exceptions=True)
                break
        await engine.pause_generation(mode)
        await check_held(engine, *readers)
        await asyncio.sleep(wait)
        heard = heard[: len(readers)]
        shown = [len(sample.token_ids) for sample in heard]
        await engine.abort_generation()
        async with within():
            await asyncio.gather(*readers)
    finally:
        await engine.continue_generation()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return [
        f"{len(sample.token_ids) - count} of {len(sample.token_ids)}"
        for sample, count in zip(heard, shown, strict=True)
        if not _ends_within_a_character(engine, sample.token_ids[: count + 1], count)
    ]


async def _begins(engine: InferenceEngine, begun: asyncio.Event, first: Heard) -> bool:
    """Return True once a stream has begun, or False if it waits because the engine runs no more requests at once.

    A request that waits while ``first``, the first stream, goes on for many steps waits for another to end.
    """
    waited = 0
    async with within():
        while not begun.is_set() and waited < _STEPS_OF_A_QUEUE:
            shown = len(first.chunks)
            waits = (await engine.stats()).waiting
            await asyncio.sleep(0.001)
            if not waits:
                waited = 0
            elif len(first.chunks) > shown:
                waited += 1
    return begun.is_set()


def _ends_within_a_character(engine: InferenceEngine, token_ids: Sequence[int], shown: int) -> bool:
    """Return whether the id after the first ``shown`` ones, if there is one, leaves a character incomplete."""
    return len(token_ids) == shown or engine.decode(list(token_ids)).endswith("\N{REPLACEMENT CHARACTER}")


async def _read(
    engine: InferenceEngine, prompt: list[int], params: SamplingParams, sample: Heard, begun: asyncio.Event
) -> None:
    """Read a stream into ``sample``; ``begun`` is set with its first chunk."""
    async with aclosing(engine.generate_stream(prompt, params)) as chunks:
        async for chunk in chunks:
            _hear(sample, chunk)
            begun.set()


@case(Capability.STREAMING)
async def chunks_say_whose_they_are(bench: Bench) -> None:
    """Chunks of many prompts and samples, with their own params and ids, name their prompt, sample and request."""
    prompts, counts = bench.prompts(3), (1, 3, 2)
    params = [SamplingParams(n=n, temperature=0, max_new_tokens=4 + 5 * n) for n in counts]
    heard = await _listen(bench, prompts, params, request_ids=["one", "two", "three"])
    assert sorted(heard) == [(prompt, sample) for prompt, n in enumerate(counts) for sample in range(n)]
    for (prompt, sample), one in heard.items():
        completion = one.completion
        assert (completion.prompt_index, completion.sample_index) == (prompt, sample)
        assert completion.prompt_token_ids == prompts[prompt]
        assert {chunk.request_id for chunk in one.chunks} == {completion.request_id}
        assert completion.request_id.startswith(("one", "two", "three")[prompt])
        assert len(completion.token_ids) <= 4 + 5 * counts[prompt]
    assert len({one.completion.request_id for one in heard.values()}) == sum(counts)


@case(Capability.STREAMING)
async def eos_comes_with_the_last_chunk(bench: Bench) -> None:
    """The EOS that ends a streamed completion is among its ids and never in its text."""
    ending = ending_prompt(bench)
    for skip in (True, False):
        params = SamplingParams(temperature=0, max_new_tokens=5, skip_special_tokens=skip)
        (sample,) = (await _listen(bench, [ending.token_ids], params)).values()
        assert (sample.token_ids, sample.text) == ([ending.eos], "")
        assert sample.completion.matched_stop == ending.eos


@case(Capability.STREAMING, Capability.LOGPROBS_TEMPERATURE)
async def each_streamed_token_has_its_logprob(bench: Bench) -> None:
    """Each chunk has a logprob for each id; together they are the completion's logprobs, and the model's."""
    params = SamplingParams(temperature=0.7, max_new_tokens=TOKENS, n=2, logprobs=0)
    for sample in (await _listen(bench, bench.prompts(3), params)).values():
        completion = sample.completion
        logprobs = [logprob for chunk in sample.chunks for logprob in chunk.logprobs or []]
        assert all(len(chunk.logprobs or []) == len(chunk.token_ids) for chunk in sample.chunks)
        assert logprobs == completion.logprobs
        own = bench.output_logprobs(completion, temperature=0.7)
        assert max(abs(a - b) for a, b in zip(logprobs, own, strict=True)) <= bench.tolerance()


@case(Capability.STREAMING, Capability.LOGPROBS_TEMPERATURE, Capability.TOP_LOGPROBS)
async def each_streamed_token_has_its_alternatives(bench: Bench) -> None:
    """Each chunk has the top alternatives of each of its ids; together they are the completion's."""
    params = SamplingParams(max_new_tokens=TOKENS, logprobs=3)
    for sample in (await _listen(bench, bench.prompts(3), params)).values():
        together = [top for chunk in sample.chunks for top in chunk.top_logprobs or []]
        assert all(len(chunk.top_logprobs or []) == len(chunk.token_ids) for chunk in sample.chunks)
        assert together == sample.completion.top_logprobs
        assert {len(top) for top in together} == {3}


@case(Capability.STREAMING)
async def without_logprobs_no_chunk_has_any(bench: Bench) -> None:
    """A stream that did not ask for logprobs carries none."""
    params = SamplingParams(max_new_tokens=5)
    for sample in (await _listen(bench, bench.prompts(2), params)).values():
        assert {(chunk.logprobs is None, chunk.top_logprobs is None) for chunk in sample.chunks} == {(True, True)}
        assert (sample.completion.logprobs, sample.completion.logprobs_mode) == (None, None)


# Nothing is taken back -----------------------------------------------------------------------------------------------


@case(Capability.STREAMING)
async def no_character_is_shown_half(bench: Bench) -> None:
    """A character made of several tokens is shown once it is complete, and never as broken bytes."""
    runs = await samples_of_spanning_characters(bench, 24)
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS)
    # _listen() checks that shown text is never taken back, so a character in the final text was never shown broken.
    heard = await _listen(bench, [run.prompt_token_ids for run in runs], params)
    check_same(bench, [heard[index, 0].completion for index in range(len(runs))], runs)


@case(Capability.STREAMING, Capability.STOP_STRINGS)
async def a_stream_shows_nothing_past_a_stop_string(bench: Bench) -> None:
    """A stream shows no text that may still become a stop string, and ends where generate() does."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        stop = max(pieces(run.text, 2, 5), key=len)
        near = [stop[:-1] + "~", stop + "~"]
        asked += [(run, {"stop": [stop, *near]}), (run, {"stop": near})]
        asked.append((run, {"stop": [bench.rng.choice(pieces(run.text, 1, 2))], "include_stop_str_in_output": True}))
    await _check_stops(bench, asked)


@case(Capability.STREAMING, Capability.STOP_REGEX)
async def a_stream_shows_nothing_past_a_stop_regex(bench: Bench) -> None:
    """A stream never shows the match of a stop regex, and ends where generate() does."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        for pattern in expressions(bench.rng, run.text):
            asked.append((run, {"stop_regex": [pattern, "never-[0-9]{9}"]}))
    await _check_stops(bench, asked)


@case(Capability.STREAMING, Capability.STOP_STRINGS, Capability.STOP_REGEX, Capability.LOGIT_BIAS)
def a_stream_with_any_stops_agrees_with_the_reference(bench: Bench) -> None:
    """With any stops, a stream takes nothing back and ends as the brute-force reference says."""
    ids = letter_ids(bench.engine, 3)
    a, b, c = (bench.engine.decode([token]) for token in ids)
    bias: Fields = {"logit_bias": dict.fromkeys(ids, 100.0), "max_new_tokens": 16, "temperature": 0}
    runs = bench.run(bench.engine.generate(bench.prompts(6), bias)).completions
    bench.run(_check_stops(bench, [(runs[0], {**bias, "stop": "!", "stop_regex": "!"})]))
    strings = st.lists(st.text(alphabet=[a, b, c], min_size=1, max_size=5), max_size=3)
    patterns = [f"{a}+{b}", f"[{a}{b}]{{3}}", f"{c}({a}|{b}{b})", f"{b}.{b}", f"{a}(?={c})", f"(?<!{a}){b}{{2}}"]
    stops = {"stop": strings, "stop_regex": st.lists(st.sampled_from(patterns), max_size=2)}
    least = 6 if bench.claims(Capability.MIN_NEW_TOKENS) else 0
    more = {"include_stop_str_in_output": st.booleans(), "min_new_tokens": st.integers(0, least)}
    asked = st.tuples(st.sampled_from(runs), st.fixed_dictionaries({**stops, **more}))

    @random_property(bench.profile.examples, bench.seed)
    @given(st.lists(asked, min_size=1, max_size=3))
    def agrees(asked: list[tuple[Completion, Fields]]) -> None:
        bench.run(_check_stops(bench, [(run, {**bias, **fields}) for run, fields in asked]))

    agrees()


# Together, and ended early -------------------------------------------------------------------------------------------


@case(Capability.STREAMING)
async def streams_and_calls_run_side_by_side(bench: Bench) -> None:
    """Concurrent streams and generate() calls each get their own completions."""
    prompts = bench.prompts(8)
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS)
    alone = [(await bench.engine.generate([prompt], params)).completions[0] for prompt in prompts]
    check_same(bench, [(await _listen(bench, prompts[:1], params))[0, 0].completion], alone[:1])
    streams = [_listen(bench, [prompt], params) for prompt in prompts[:4]]
    calls = [bench.engine.generate([prompt], params) for prompt in prompts[4:]]
    heard, outputs = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*calls))
    check_same(bench, [sample.completion for one in heard for sample in one.values()], alone[:4])
    check_same(bench, [output.completions[0] for output in outputs], alone[4:])


@case(Capability.STREAMING)
async def closing_a_stream_ends_its_requests(bench: Bench) -> None:
    """Closing a stream early ends its requests in the engine; other requests go on."""
    prompt = bench.prompt()
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS)
    alone = (await bench.engine.generate([prompt], params)).completions
    for take in (1, 5):
        stream = bench.engine.generate_stream(bench.prompts(3), bench.long())
        for _ in range(take):
            await anext(stream)
        beside = asyncio.create_task(bench.engine.generate([prompt], params))
        await asyncio.sleep(0)
        async with within():
            await stream.aclose()
        check_same(bench, (await beside).completions, alone)
        await assert_idle_soon(bench, "requests of a stream that was closed are still there")


@case(Capability.STREAMING)
async def cancelling_a_listener_ends_its_requests(bench: Bench) -> None:
    """Cancelling the task that reads a stream ends its requests in the engine."""
    begun = asyncio.Event()

    async def listen() -> None:
        async with aclosing(bench.engine.generate_stream(bench.prompts(3), bench.long())) as stream:
            async for _ in stream:
                begun.set()

    task = asyncio.create_task(listen())
    task.add_done_callback(lambda _: begun.set())
    async with within():
        await begun.wait()
    task.cancel()
    assert await until_ended(task), "a cancelled listener did not end"
    if not task.cancelled():
        task.result()  # it ended before the cancellation; raise its error, if any
    await assert_idle_soon(bench, "requests of a listener that was cancelled are still there")


@case(Capability.STREAMING)
async def a_stream_that_nobody_reads_does_no_harm(bench: Bench) -> None:
    """An unread stream does not block other requests, loses nothing, and can be read to its end later."""
    prompts = bench.prompts(2)
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS)
    whole = (await bench.engine.generate(prompts, params)).completions
    async with aclosing(bench.engine.generate_stream(prompts[:1], params)) as stream:
        chunks = [await anext(stream)]
        beside = (await bench.engine.generate(prompts[1:], params)).completions
        chunks += [chunk async for chunk in stream]
    check_same(bench, beside, whole[1:])
    sample = Heard()
    for chunk in chunks:
        _hear(sample, chunk)
    _check_whole(sample)
    check_same(bench, [sample.completion], whole[:1])


@case(Capability.STREAMING)
async def a_stream_that_takes_too_long_is_a_typed_error(bench: Bench) -> None:
    """timeout= ends a stream in DeadlineExceeded; its requests end, and the engine serves on."""
    with refused(DeadlineExceeded, naming="completions"):
        async with aclosing(bench.engine.generate_stream(bench.prompts(3), bench.long(), timeout=1e-9)) as stream:
            async for _ in stream:
                pass
    await assert_idle_soon(bench, "requests of a stream that timed out are still there")


@case(Capability.STREAMING)
async def a_slow_reader_does_not_outlast_the_timeout(bench: Bench) -> None:
    """timeout= also ends a stream whose reader is slower than the engine, so that a chunk is always waiting for it."""
    now = asyncio.get_running_loop().time
    params = bench.long()
    # Short enough that even a fast engine still generates after four times the timeout, when the test looks.
    assert params.max_new_tokens is not None
    timeout = min(_PATIENCE, params.max_new_tokens / max(bench.tokens_per_second, 1.0) / 10)
    begun = looked = now()
    stood, late = 0.0, 0
    try:
        async with aclosing(bench.engine.generate_stream(bench.prompts(2), params, timeout=timeout)) as stream:
            async for _ in stream:
                # If the event loop stood still at the timeout, as it may on a busy machine, the stream gets that time
                # again for what had arrived, and the first chunks may come before the loop looks at the clock.
                stood, looked = max(stood, now() - looked), now()
                late += looked - begun > 4 * timeout + 3 * stood
                if late > _CHUNKS_BEFORE_THE_CLOCK:
                    break
                await asyncio.sleep(timeout / 15)
            running = (await bench.engine.stats()).running
    except DeadlineExceeded:
        running = 0
    still_runs = late > _CHUNKS_BEFORE_THE_CLOCK and running
    assert not still_runs, f"{looked - begun:.2g} s after its start a stream with timeout={timeout:g} still went on"
    await assert_idle_soon(bench, "requests of a stream that timed out are still there")


@case(Capability.STREAMING)
async def answers_that_came_while_the_event_loop_was_blocked_are_kept(bench: Bench) -> None:
    """Answers that arrive while the trainer blocks the event loop past a request's timeout are not lost."""
    params, seconds = bench.long(12), 1.0
    whole = asyncio.create_task(bench.engine.generate(bench.prompt(), params, timeout=seconds))
    chunks = bench.engine.generate_stream(bench.prompt(), params, timeout=seconds)
    await anext(chunks)  # both requests have now reached the engine, and are seldom answered yet
    time.sleep(1.2 * seconds)  # noqa: ASYNC251 - as a training step does
    answered = await asyncio.gather(whole, _completions(chunks), return_exceptions=True)
    assert not any(isinstance(one, DeadlineExceeded) for one in answered), f"answers were thrown away: {answered}"
    assert not any(isinstance(one, BaseException) for one in answered), f"{answered}"


@case(Capability.STREAMING, Capability.ABORT)
async def an_aborted_stream_ends_with_what_it_has(bench: Bench) -> None:
    """Aborting a streamed request ends its stream with a completion, marked aborted, of exactly what was streamed."""
    params = bench.long()
    heard = await _aborted(bench, params)
    completion = heard[0].completion
    with in_time(completion):
        assert completion.finish_reason is FinishReason.ABORT, "the aborted request ran to its end"
    assert 0 < len(completion.token_ids) < (params.max_new_tokens or 0)
    assert not heard[1].chunks or heard[1].chunks[-1].completion is None, "the other one was ended too"
    await assert_idle_soon(bench, "a stream that was closed is still there")


# ---------------------------------------------------------------------------------------------------------------------


async def _aborted(bench: Bench, params: SamplingParams) -> list[Heard]:
    """Stream two requests, abort the first after three chunks, and return what was streamed until it ended."""
    heard = [Heard(), Heard()]
    stream = bench.engine.generate_stream(bench.prompts(2), params, request_ids=["ends", "goes-on"])
    async with aclosing(stream):
        async for chunk in stream:
            _hear(heard[chunk.prompt_index], chunk)
            if len(heard[0].chunks) == 3:
                await bench.engine.abort("ends")
            if heard[0].chunks and heard[0].chunks[-1].completion is not None:
                break
    _check_whole(heard[0])
    return heard


def _hear(sample: Heard, chunk: CompletionChunk) -> None:
    """Add a chunk: it must not be empty, nor follow the last chunk."""
    assert not sample.chunks or sample.chunks[-1].completion is None, "a chunk came after the last one"
    assert chunk.token_ids or chunk.text or chunk.completion, "an empty chunk"
    assert (chunk.finish_reason is None) == (chunk.completion is None)
    sample.chunks.append(chunk)
    sample.token_ids += chunk.token_ids
    sample.text += chunk.text


def _check_whole(sample: Heard) -> None:
    """Assert that the chunks together are the completion, with no text that the completion lacks."""
    completion = sample.completion
    assert sample.token_ids == completion.token_ids, f"{sample.token_ids} were shown, not {completion.token_ids}"
    # Text is only ever appended, so equality also shows that nothing was taken back.
    assert sample.text == completion.text, f"shown: {sample.text!r}, completion: {completion.text!r}"
    if completion.logprobs is not None:
        logprobs = [value for chunk in sample.chunks for value in chunk.logprobs or []]
        assert logprobs == completion.logprobs, f"logprobs shown: {logprobs}, of the completion: {completion.logprobs}"
    if completion.top_logprobs is not None:
        tops = [top for chunk in sample.chunks for top in chunk.top_logprobs or []]
        assert tops == completion.top_logprobs, (
            f"alternatives shown: {tops}, of the completion: {completion.top_logprobs}"
        )


async def _completions(chunks: AsyncGenerator[CompletionChunk, None]) -> list[Completion]:
    return [chunk.completion async for chunk in chunks if chunk.completion is not None]


async def _listen(
    bench: Bench,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **arguments: Sequence[str],
) -> dict[tuple[int, int], Heard]:
    """Read a stream to its end; return the chunks of each sample, by prompt and sample index."""
    heard: dict[tuple[int, int], Heard] = {}
    stream = bench.engine.generate_stream(list(prompts), params, **arguments)  # type: ignore[arg-type]
    async with aclosing(stream):
        async for chunk in stream:
            sample = heard.setdefault((chunk.prompt_index, chunk.sample_index), Heard())
            _hear(sample, chunk)
            shown = bench.engine.decode(sample.token_ids, skip_special_tokens=_of(params, chunk).skip_special_tokens)
            assert shown.startswith(sample.text), f"{sample.text!r} is shown, but its ids make {shown!r}"
    for sample in heard.values():
        _check_whole(sample)
    return heard


def _of(params: SamplingParams | Sequence[SamplingParams], chunk: CompletionChunk) -> SamplingParams:
    return params if isinstance(params, SamplingParams) else params[chunk.prompt_index]


async def _check_stops(bench: Bench, asked: Sequence[tuple[Completion, Fields]]) -> None:
    """Stream each sample again with stops, and compare with the reference applied to the unstopped one."""
    alternatives = bench.claims(Capability.TOP_LOGPROBS) and bench.claims(Capability.LOGPROBS_TEMPERATURE)
    extra: Fields = {"logprobs": 2} if alternatives else {}
    params = [stop_params({**fields, **extra}) for _, fields in asked]
    heard = await _listen(bench, [run.prompt_token_ids for run, _ in asked], params)
    for index, ((free, _), own) in enumerate(zip(asked, params, strict=True)):
        agrees_with_reference(bench, free, own, heard[index, 0].completion)
