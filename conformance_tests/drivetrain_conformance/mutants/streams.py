"""Streams that lose, repeat, hold back or show too much."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from drivetrain.backend.base import GenerateRequest, TokenDelta
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.validation import as_prompts, check_sampling_params
from drivetrain.errors import DeadlineExceeded
from drivetrain.types.outputs import CompletionChunk, GenerationOutput, TopLogprobs
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, deltas_mutant, own

_Deltas = AsyncGenerator[TokenDelta, None]


@deltas_mutant("streaming/a_stream_equals_generate", says="shown, ")
async def loses_a_delta(deltas: _Deltas) -> _Deltas:
    """A stream's third step is not shown."""
    step = 0
    async for delta in deltas:
        step += 1
        if step != 3 or delta.result is not None:
            yield delta


@deltas_mutant("streaming/a_stream_equals_generate", says="were shown, not")
async def repeats_a_delta(deltas: _Deltas) -> _Deltas:
    """A stream's third step is shown twice."""
    step = 0
    async for delta in deltas:
        step += 1
        if step == 3 and delta.result is None:
            yield delta
        yield delta


@mutant("streaming/a_stream_shows_nothing_past_a_stop_string", says="alternatives shown")
class streams_the_first_alternatives(CorrectBackend):
    """With stop strings, each step of a stream comes with the alternatives of the stream's first step."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        first: list[TopLogprobs] | None = None
        async with aclosing(super().stream(request)) as deltas:
            async for delta in deltas:
                if not (request.params.stop and delta.top_logprobs):
                    yield delta
                    continue
                first = first or delta.top_logprobs[:1]
                yield dataclasses.replace(delta, top_logprobs=first * len(delta.top_logprobs))


@mutant("streaming/a_stream_shows_nothing_past_a_stop_string", says="logprobs shown")
class streams_logprobs_a_step_late(CorrectBackend):
    """With stop strings, each step of a stream but the first comes with the logprobs of the step before."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        before: list[float] | None = None
        async with aclosing(super().stream(request)) as deltas:
            async for delta in deltas:
                late = before if request.params.stop and before and len(before) == len(delta.token_ids) else None
                before = delta.logprobs
                yield dataclasses.replace(delta, logprobs=late or delta.logprobs)


@deltas_mutant("streaming/a_stream_equals_generate", says="cached tokens, and")
async def streams_without_the_cached_tokens(deltas: _Deltas) -> _Deltas:
    """A streamed completion says that none of its prompt was cached."""
    async for delta in deltas:
        result = delta.result and dataclasses.replace(delta.result, cached_tokens=0)
        yield dataclasses.replace(delta, result=result)


@deltas_mutant("streaming/a_stream_equals_generate", says="a streamed prompt's logprobs are")
async def streams_without_scores(deltas: _Deltas) -> _Deltas:
    """Prompt logprobs of a streamed completion are all 0."""
    async for delta in deltas:
        result = delta.result
        if result is not None and result.prompt_logprobs is not None:
            scores: list[float | None] = [None, *[0.0] * (len(result.prompt_logprobs) - 1)]
            result = dataclasses.replace(result, prompt_logprobs=scores)
        yield dataclasses.replace(delta, result=result)


@deltas_mutant("streaming/tokens_come_while_others_are_generated", says="the first chunk came when all was generated")
async def streams_all_at_the_end(deltas: _Deltas) -> _Deltas:
    """A stream is silent until generation has ended."""
    for delta in [delta async for delta in deltas]:
        yield delta


@deltas_mutant("streaming/tokens_come_while_others_are_generated", says="tokens that no chunk had shown")
async def streams_in_bursts(deltas: _Deltas) -> _Deltas:
    """A stream shows eight steps at once."""
    held: list[TokenDelta] = []
    async for delta in deltas:
        held.append(delta)
        if len(held) == 8 or delta.result is not None:
            for one in held:
                yield one
            held.clear()


@deltas_mutant("streaming/tokens_come_while_others_are_generated", says="tokens that no chunk had shown")
async def streams_a_few_tokens_late(deltas: _Deltas) -> _Deltas:
    """A stream shows each step three steps later."""
    held: list[TokenDelta] = []
    async for delta in deltas:
        held.append(delta)
        while len(held) > 3 or (held and delta.result is not None):
            yield held.pop(0)


@deltas_mutant("streaming/each_streamed_token_has_its_logprob", says="logprobs shown: ")
async def streams_logprobs_of_the_token_before(deltas: _Deltas) -> _Deltas:
    """While a stream runs, each logprob is that of the previous step."""
    before: list[float] | None = None
    async for delta in deltas:
        late, before = before, delta.logprobs
        yield dataclasses.replace(delta, logprobs=delta.logprobs and (late or [0.0]))


@mutant("streaming/closing_a_stream_ends_its_requests", says="requests of a stream that was closed are still there")
class goes_on_after_a_stream_is_closed(CorrectBackend):
    """Closing a stream early leaves its request running in the engine."""

    _left: set[asyncio.Task[None]] = own(set)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        correct = super().stream(request)

        async def read() -> None:
            async for delta in correct:
                deltas.put_nowait(delta)

        task = asyncio.create_task(read())
        self._left.add(task)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        while True:
            delta = await deltas.get()
            yield delta
            if delta.result is not None:
                return


@mutant("streaming/no_character_is_shown_half", says="�")
class streams_half_characters(InferenceEngine):
    """Each streamed token is decoded alone, so that characters of several tokens arrive in pieces."""

    async def generate_stream(self, *prompts: Any, **options: Any) -> AsyncGenerator[CompletionChunk, None]:
        async with aclosing(super().generate_stream(*prompts, **options)) as chunks:
            async for chunk in chunks:
                for token_id in chunk.token_ids[:-1]:
                    text = self.decode([token_id])
                    yield dataclasses.replace(chunk, token_ids=[token_id], text=text, completion=None)
                last = chunk.token_ids[-1:]
                yield dataclasses.replace(chunk, token_ids=last, text=self.decode(last))


@mutant("streaming/a_stream_shows_nothing_past_a_stop_string", says="shown: '")
class streams_past_a_stop(InferenceEngine):
    """The beginning of a stop string is shown, though the completion lacks it."""

    async def generate_stream(
        self, prompts: Any, sampling_params: Any = None, **options: Any
    ) -> AsyncGenerator[CompletionChunk, None]:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(as_prompts(prompts))
        asked = [check_sampling_params(one) for one in each]
        showing = [one.model_copy(update={"include_stop_str_in_output": bool(one.stop)}) for one in asked]
        async with aclosing(super().generate_stream(prompts, showing, **options)) as chunks:
            async for chunk in chunks:
                whole = chunk.completion
                cuts = not asked[chunk.prompt_index].include_stop_str_in_output
                if cuts and whole is not None and isinstance(whole.matched_stop, str):
                    whole = dataclasses.replace(whole, text=whole.text.removesuffix(whole.matched_stop))
                yield dataclasses.replace(chunk, completion=whole)


@mutant("streaming/a_slow_reader_does_not_outlast_the_timeout", says="still went on")
class times_a_stream_only_while_it_waits(InferenceEngine):
    """A stream's timeout is checked only while no chunk is ready."""

    async def generate_stream(self, *prompts: Any, **options: Any) -> AsyncGenerator[CompletionChunk, None]:
        begun, seconds = asyncio.get_running_loop().time(), options.pop("timeout", None)
        correct = super().generate_stream(*prompts, **options)
        queue: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()

        async def pump() -> None:
            async with aclosing(correct) as chunks:
                async for chunk in chunks:
                    queue.put_nowait(chunk)

        task = asyncio.create_task(pump())
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while True:
                left = None if seconds is None else seconds - asyncio.get_running_loop().time() + begun
                async with deadline(left, "streamed completions"):
                    chunk = await queue.get()
                if chunk is None:
                    break
                yield chunk
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@mutant("streaming/answers_that_came_while_the_event_loop_was_blocked_are_kept", says="answers were thrown away")
class forgets_that_it_was_blocked(InferenceEngine):
    """A timeout that passed while the event loop was blocked ends a call whose answer is ready."""

    async def generate(self, *prompts: Any, **options: Any) -> GenerationOutput:
        try:
            async with asyncio.timeout(options.get("timeout")):
                return await super().generate(*prompts, **options)
        except TimeoutError as error:
            raise DeadlineExceeded("timed out waiting for completions") from error


@mutant("lifecycle/closing_never_hangs", says="a call of generate_stream() that outlasts timeouts.generate is answered")
class streams_without_the_configured_timeout(InferenceEngine):
    """A stream without a timeout of its own ends after an hour; timeouts.generate is ignored."""

    async def generate_stream(
        self, *args: Any, timeout: float | None = None, **options: Any
    ) -> AsyncGenerator[CompletionChunk, None]:
        async with aclosing(super().generate_stream(*args, timeout=timeout or 3600.0, **options)) as chunks:
            async for chunk in chunks:
                yield chunk
