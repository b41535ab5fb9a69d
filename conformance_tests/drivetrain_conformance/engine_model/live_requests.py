"""Requests that run in tasks while an engine is paused or updated. Every wait has a timeout."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.outputs import Completion, CompletionChunk, GenerationOutput
from drivetrain_conformance.harness.time_limits import Hangs, until_ended, within

_ROUND_TRIPS: Final = 4
"""Consecutive calls to a paused engine; when they are answered, results that it sent earlier have arrived."""

Call = Coroutine[object, object, GenerationOutput] | AsyncGenerator[CompletionChunk, None]


class Live:
    """One request, running in a task."""

    def __init__(self, call: Call) -> None:
        self.seen = 0
        """Number of tokens that its stream has brought."""
        self._task = asyncio.create_task(self._read(call) if isinstance(call, AsyncGenerator) else self._await(call))

    @property
    def done(self) -> bool:
        """True if the request has ended, in success or failure."""
        return self._task.done()

    async def result(self) -> list[Completion]:
        """Wait for the request's completions."""
        async with within("a request"):
            return await asyncio.shield(self._task)

    async def drop(self) -> None:
        """Cancel the request and ignore its outcome."""
        self._task.cancel()
        await until_ended(self._task)
        await asyncio.gather(self._task, return_exceptions=True)

    @staticmethod
    async def _await(call: Coroutine[object, object, GenerationOutput]) -> list[Completion]:
        return (await call).completions

    async def _read(self, stream: AsyncGenerator[CompletionChunk, None]) -> list[Completion]:
        ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        logprobs: dict[tuple[int, int], list[float]] = defaultdict(list)
        texts: dict[tuple[int, int], str] = defaultdict(str)
        found: dict[tuple[int, int], Completion] = {}
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                sample = chunk.prompt_index, chunk.sample_index
                assert sample not in found, f"a chunk came after the last one of (prompt, sample) {sample}"
                ids[sample] += chunk.token_ids
                texts[sample] += chunk.text
                logprobs[sample] += chunk.logprobs or []
                self.seen += len(chunk.token_ids)
                if chunk.completion is not None:
                    found[sample] = chunk.completion
        for sample, whole in found.items():
            assert ids[sample] == whole.token_ids, "the chunks put together are not the completion's ids"
            assert texts[sample] == whole.text, "the chunks put together are not the completion's text"
            assert logprobs[sample] == (whole.logprobs or []), "the chunks put together are not its logprobs"
        return [found[sample] for sample in sorted(found)]


async def settle(engine: InferenceEngine, *in_flight: Live) -> None:
    """Wait until the engine holds each request that has not come back.

    A request that ended before a pause may still be on its way, through a process or two. It has come back when the
    engine has answered several calls after it.
    """
    held = unfinished = 0
    rounds = _ROUND_TRIPS if engine.is_paused else 1
    try:
        async with within("a request that the engine has lost"):
            while rounds:
                for _ in range(5):
                    await asyncio.sleep(0)
                held, unfinished = await held_by(engine), sum(not live.done for live in in_flight)
                if held >= unfinished:
                    rounds -= 1
                else:
                    await asyncio.sleep(0.001)
    except Hangs:
        raise Hangs(f"{unfinished} requests in flight have not come back, and the engine holds {held}") from None


async def held_by(engine: InferenceEngine) -> int:
    """Return how many requests the engine holds, running or waiting."""
    stats = await engine.stats()
    return stats.running + stats.waiting


async def until_taken(engine: InferenceEngine, live: Live, before: int) -> None:
    """Wait until a request that must be refused has come back, or the engine holds more than ``before`` requests.

    Its refusal may arrive after answers to later calls.
    """
    async with within("a request that must be refused"):
        while not live.done and await held_by(engine) <= before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def proceed(*streams: Live, tokens: int) -> None:
    """Wait until each of these running streams has brought this many more tokens, or has ended."""
    goals = [(live, live.seen + tokens) for live in streams]
    async with within(f"the next {tokens} tokens of a stream"):
        while any(live.seen < goal and not live.done for live, goal in goals):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
