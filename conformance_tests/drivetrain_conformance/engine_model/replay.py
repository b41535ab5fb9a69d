"""Functions with which the suite, and the script that reproduces a failure, play a history.

Each function is one line of such a script. Every wait has a timeout.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.errors import DrivetrainError, EngineStateError
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, CompletionChunk, FinishReason, GenerationOutput
from drivetrain.types.weights import DiskSource, WeightUpdateRequest
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.engine_model.expected_answers import Answers, End, Fields
from drivetrain_conformance.engine_model.strategies import WeightPlanChoice
from drivetrain_conformance.harness.time_limits import Hangs, until_ended, within
from drivetrain_weight_sync import WeightSync

_T = TypeVar("_T")

_IN_THE_PIPE: Final = 32
"""Tokens of a frozen request that may still arrive, because they were made before it was frozen."""

_ROUND_TRIPS: Final = 4
"""Consecutive calls to a paused engine; when they are answered, results that it sent earlier have arrived."""

Call = Coroutine[object, object, GenerationOutput] | AsyncGenerator[CompletionChunk, None]


@contextmanager
def refused(error: type[DrivetrainError], state: str | None = None) -> Generator[None, None, None]:
    """Require the block to be refused with this error, naming this state."""
    named = None
    try:
        yield
    except error as refusal:
        named = refusal.state if isinstance(refusal, EngineStateError) else None
    else:
        raise AssertionError(f"accepted, where {error.__name__} must refuse" + (f" ({state})" if state else ""))
    if state is not None and named != state:
        raise AssertionError(f"refused by {error.__name__} for state {named!r}, where it is {state!r}")


# Requests ------------------------------------------------------------------------------------------------------------


class Live:
    """One request, running in a task."""

    def __init__(self, call: Call) -> None:
        self.seen = 0
        """Number of tokens that its stream has brought."""
        self.mark: int | None = None
        """Value of :attr:`seen` when it was frozen; None if it is not frozen."""
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


async def start(engine: InferenceEngine, call: Call) -> Live:
    """Begin a request; return once the engine has it, or raise its refusal."""
    live = Live(call)
    await settle(engine)
    if live.done:
        await live.result()
    return live


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
                stats = await engine.stats()
                held, unfinished = stats.running + stats.waiting, sum(not live.done for live in in_flight)
                if held >= unfinished:
                    rounds -= 1
                else:
                    await asyncio.sleep(0.001)
    except Hangs:
        raise Hangs(f"{unfinished} requests in flight have not come back, and the engine holds {held}") from None


async def proceed(*streams: Live, tokens: int) -> None:
    """Wait until each of these running streams has brought this many more tokens, or has ended."""
    goals = [(live, live.seen + tokens) for live in streams]
    async with within(f"the next {tokens} tokens of a stream"):
        while any(live.seen < goal and not live.done for live, goal in goals):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def look(
    engine: InferenceEngine,
    *,
    state: str,
    version: str,
    paused: bool,
    running: Sequence[Live] = (),
    frozen: Sequence[Live] = (),
    waiting: Sequence[Live] = (),
) -> None:
    """Assert that the engine reports this state, and that waiting and frozen requests make no progress."""
    assert engine.state.value == state, f"the engine is {engine.state.value}, where it must be {state}"
    assert engine.is_paused is paused, f"is_paused is {engine.is_paused}, where it must be {paused}"
    found = engine.get_weight_version()
    assert found == version, f"the weight version is {found!r}, where it must be {version!r}"
    for live in running:
        live.mark = None
    for live in waiting:
        assert not live.done, "a request that waits has ended"
        assert live.seen == 0, f"a request that waits has made {live.seen} tokens"
    for live in frozen:
        assert not live.done, "a frozen request has ended"
        live.mark = live.seen if live.mark is None else live.mark
        assert live.seen <= live.mark + _IN_THE_PIPE, f"a frozen request made {live.seen - live.mark} tokens"
    # Give a frozen request that wrongly continues a moment to show it.
    await asyncio.sleep(0.002 if frozen or waiting else 0)


# Ends ----------------------------------------------------------------------------------------------------------------


async def ended(
    live: Live,
    answers: Answers,
    tokens: int,
    end: End,
    versions: Sequence[str],
    stale: Sequence[str] = (),
    *,
    samples: int = 1,
    fields: Fields | None = None,
    least: int = 0,
    by_now: bool = False,
) -> list[Completion]:
    """Wait for a request to come back, and check each of its samples.

    Args:
        live: The request.
        answers: The expected answers.
        tokens: The requested number of tokens.
        end: How it must have ended.
        versions: Weight versions under which it ran, in order.
        stale: Versions under which it ran on a cache of older weights.
        samples: Number of completions.
        fields: Further fields of the request.
        least: Minimum number of tokens of each completion.
        by_now: It must have come back already.
    """
    if by_now:
        assert live.done, "a request that must have run to its end has not come back"
    completions = await live.result()
    assert [completion.sample_index for completion in completions] == list(range(samples))
    # Samples end one by one: some may have ended by themselves before the request was frozen and then aborted.
    of_each = End.ABORTED_OR_WHOLE if end is End.ABORTED and samples > 1 else end
    if end is End.ABORTED:
        assert any(completion.finish_reason is FinishReason.ABORT for completion in completions), (
            "it was aborted while it was frozen, and every sample ended by itself"
        )
    for completion in completions:
        answers.check(completion, tokens, of_each, versions, stale, fields)
        assert len(completion.token_ids) >= least, f"it had made a token, and came back with {completion.token_ids}"
    return completions


# Weight updates ------------------------------------------------------------------------------------------------------


def from_disk(folder: Path, version: str, mode: PauseMode | str) -> WeightUpdateRequest:
    """Return a request for an update from a checkpoint folder."""
    return WeightUpdateRequest(version=version, source=DiskSource(path=str(folder)), mode=PauseMode(mode))


async def load(update: WeightTransaction, begin: float = 0.0, end: float = 1.0, *, order: int = 0) -> None:
    """Load a share of an update's buckets, one by one, in the order that ``order`` determines."""
    indices = shuffled(range(update.buckets), order)
    for index in indices[round(begin * len(indices)) : round(end * len(indices))]:
        await update.load([index])


async def push(
    engine: InferenceEngine, folder: Path, version: str, mode: PauseMode | str, *, plan: WeightPlanChoice
) -> None:
    """Update from tensors of this process, by the fastest strategy that the engine claims."""
    tensors = await asyncio.to_thread(tensors_of, folder)
    source = {name: tensors[name] for name in shuffled(sorted(tensors), plan.order)}
    size = plan.bucket_bytes
    async with WeightSync.connect(source, engine, mode=PauseMode(mode), bucket_bytes=size, cast=True) as sync:
        await sync.push(version=version)


def shuffled(items: Sequence[_T], order: int) -> list[_T]:
    """Shuffle the items with the seed ``order``; 0 leaves them as they are."""
    found = list(items)
    if order:
        random.Random(order).shuffle(found)
    return found
