"""Checks of the weight-sync cases: the served weights, the state after an update, and each token's version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, EngineStateError
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, FinishReason, VersionSpan
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assertions.same_answers import check_same, gaps
from drivetrain_conformance.assertions.weight_checks import check_made_by, load_all
from drivetrain_conformance.assets.weight_sources import from_disk, nowhere
from drivetrain_conformance.harness.testbench import Bench, TooLate
from drivetrain_conformance.harness.time_limits import within
from drivetrain_conformance.references.oracle import CacheOracle, log_softmax
from drivetrain_conformance.references.tolerances import rounding_explains

NEW: Final = "new"
"""Version of most updates."""
TOKENS: Final = 300
"""Length of a request that is in flight while weights change."""


def check_state(engine: InferenceEngine, state: EngineState, when: str = "") -> None:
    """Raise unless the engine is in this state."""
    assert engine.state is state, f"it is {engine.status.describe()}, not {state.value} {when}"


async def check_serves(bench: Bench, model: Path, version: str) -> None:
    """Raise unless the engine is ready, reports ``version``, and answers as ``model`` does and other weights do not."""
    engine = bench.engine
    check_state(engine, EngineState.READY)
    assert not engine.is_paused, "it is still paused"
    assert engine.get_weight_version() == version
    completions = await bench.greedy(bench.prompts(3))
    check_made_by(bench, completions, model)
    assert {completion.weight_version for completion in completions} <= {version, None}
    another = bench.other_weights() if model == bench.model else bench.model
    assert max(gaps(bench, completion, another).max() for completion in completions) > bench.tolerance(), (
        "the answers are as good as those of other weights, so they show nothing"
    )


async def one(bench: Bench, prompt: list[int]) -> Completion:
    """Return the greedy completion of one prompt, computed alone in the engine."""
    (completion,) = await bench.greedy([prompt])
    return completion


async def one_by_one(bench: Bench, prompts: Sequence[list[int]]) -> list[Completion]:
    """Return greedy completions of several prompts, each computed alone in the engine."""
    return [await one(bench, prompt) for prompt in prompts]


@asynccontextmanager
async def unchanged(bench: Bench) -> AsyncIterator[None]:
    """Raise if the block changes version, state or answers."""
    engine, prompts = bench.engine, bench.prompts(2)
    version = engine.get_weight_version()
    before = await one_by_one(bench, prompts)
    yield
    check_state(engine, EngineState.READY)
    assert not engine.is_paused
    assert engine.get_weight_version() == version
    check_same(bench, await one_by_one(bench, prompts), before)


async def same_weights_again(bench: Bench) -> None:
    """Update from disk to the current weights, under their current version, which changes nothing.

    A case that needs more than disk updates calls this first, so that an engine without them refuses before anything
    else was done to it.
    """
    await bench.engine.load_weights_from_disk(str(bench.model), bench.engine.get_weight_version())


async def same_label_again(engine: InferenceEngine) -> None:
    """Relabel the weights with their current version, which changes nothing; engines without version spans refuse."""
    await engine.update_weight_version(engine.get_weight_version())


async def check_dirty(bench: Bench, version: str) -> None:
    """Raise unless the engine is dirty: paused, at ``version``, and refusing requests and ``continue_generation``."""
    engine = bench.engine
    check_state(engine, EngineState.DIRTY)
    assert engine.is_paused
    assert engine.get_weight_version() == version, "a version was published whose weights are not there"
    with raises(EngineStateError, "a request to an engine with weights of no version") as refusal:
        await engine.generate(bench.prompt())
    assert refusal.error.state == "dirty"
    assert "dirty" in str(refusal.error)
    with raises(EngineStateError, "continue_generation() of an engine with weights of no version"):
        await engine.continue_generation()
    check_state(engine, EngineState.DIRTY)


async def check_recovers(bench: Bench) -> None:
    """Raise unless a dirty engine stays dirty after a refused update, and serves again after a full one."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    with raises(DrivetrainError, "a folder that is not there"):
        await engine.load_weights_from_disk(str(nowhere(bench.models)), "bad")
    await check_dirty(bench, version)
    await engine.load_weights_from_disk(str(other), "recovered")
    await check_serves(bench, other, "recovered")


class Late:
    """A request that arrives while weights change; cancelled at the end of its block."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._prompt = bench.prompt()
        self._task: asyncio.Task[Completion] | None = None

    def arrive(self) -> None:
        """Send the request now."""
        self._task = asyncio.create_task(one(self._bench, self._prompt))

    async def is_held(self) -> bool:
        """Return True if there is no answer yet, though there was time for one."""
        assert self._task is not None
        await asyncio.sleep(0.05)
        return not self._task.done()

    async def completion(self) -> Completion:
        """Wait for the answer, with a timeout."""
        assert self._task is not None
        async with within():
            return await self._task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Updated:
    """Requests that were in flight, or arrived, while weights changed."""

    old: str
    """The version before the update."""
    completions: list[Completion]
    """Completions of the two requests in flight."""
    late: Completion
    """Completion of the request that arrived during the update."""


async def update_in_flight(bench: Bench, mode: PauseMode) -> Updated:
    """Update the weights while two greedy requests with logprobs are in flight and a third arrives."""
    engine = bench.engine
    old = engine.get_weight_version()
    await same_weights_again(bench)
    await same_label_again(engine)
    params = bench.long(TOKENS, logprobs=0, logprobs_mode="raw")
    async with bench.in_flight(bench.prompts(2), params) as running, Late(bench) as late:
        async with engine.weight_update(from_disk(bench.other_weights(), mode=mode)) as update:
            late.arrive()
            await load_all(update)
            assert await late.is_held(), "a request was served in the middle of an update"
            ended = running.done() and mode in (PauseMode.RETRACT, PauseMode.IN_PLACE)
        check_state(engine, EngineState.READY)
        assert not engine.is_paused, "the update left the engine paused"
        async with within():
            completions = (await running).completions
        if ended and all(completion.finish_reason is not FinishReason.ABORT for completion in completions):
            raise TooLate("the requests ended before the update")
        return Updated(old, completions, await late.completion())


def check_spans(completion: Completion, *versions: str) -> None:
    """Raise unless the spans have these versions, are not empty, and cover all tokens without a gap."""
    spans = completion.weight_versions
    assert tuple(span.version for span in spans) == versions, f"the spans are {spans}"
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1], f"the spans are {spans}"
    assert edges == sorted(set(edges)), f"the spans are {spans}"
    assert edges[-1] == len(completion.token_ids), f"the spans are {spans} of {len(completion.token_ids)} tokens"


def check_boundary(bench: Bench, completion: Completion, old: Path, new: Path, *, recomputed: bool = True) -> None:
    """Raise unless the first span's tokens are greedy choices of ``old``, and the second's of ``new``.

    On a cache that was not recomputed, the second span's tokens are no model's greedy choices; they must only differ
    from those of ``old``.
    """
    end = completion.weight_versions[0].end
    by_old, by_new = gaps(bench, completion, old), gaps(bench, completion, new)
    tolerance = bench.tolerance()
    assert by_old[:end].max() <= tolerance, "a token of the first span was not made by the old weights"
    assert by_old[end:].max() > tolerance, "the tokens of the second span are still those of the old weights"
    if recomputed:
        assert by_new[end:].max() <= tolerance, "a token of the second span was not made by the new weights"


def check_logprobs(bench: Bench, completion: Completion, model: Path, span: VersionSpan) -> None:
    """Raise unless the logprobs of the span's tokens are those that ``model`` computes for them in their context."""
    assert completion.logprobs is not None
    expected = bench.output_logprobs(completion, model=model)
    off = np.abs(np.subtract(completion.logprobs, expected))[span.start : span.end]
    assert rounding_explains(off, bench.tolerance()), (
        f"the logprob of token {span.start + int(off.argmax())} is {off.max():.3g} nats from that of the model in "
        f"{model.name}"
    )


def check_kept_cache(bench: Bench, completion: Completion, old: Path, new: Path) -> None:
    """Raise unless the second span's logprobs are those of ``new`` on the KV cache that ``old`` computed.

    This shows at which token the new weights took over, and that the cache was kept.
    """
    later, end = bench.oracle(new), completion.weight_versions[0].end
    if not isinstance(later, CacheOracle):
        return
    assert completion.logprobs is not None
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    # The new weights read the last token that the old ones made, so its cache entry is theirs.
    cached = len(completion.prompt_token_ids) + end - 1
    rows = log_softmax(later.logits_on_the_cache_of(bench.oracle(old), ids, cached))[:-1]
    expected = rows[np.arange(len(rows)), completion.token_ids[end:]]
    off = np.abs(np.subtract(completion.logprobs[end:], expected))
    assert rounding_explains(off, bench.tolerance()), (
        f"the logprob of token {end + int(off.argmax())} is {off.max():.3g} nats from that of the new weights, which "
        f"took over with token {end}, on the cache that the old ones had made"
    )


def check_late(bench: Bench, updated: Updated) -> None:
    """Raise unless the request that arrived during the update was answered by the new version alone."""
    check_spans(updated.late, NEW)
    check_made_by(bench, [updated.late], bench.other_weights())
