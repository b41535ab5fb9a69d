"""What the cases of weight sync look at: whose answers these are, what an update left, which version made a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

import numpy as np
import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.errors import DrivetrainError, EngineStateError, UnsupportedCapability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, VersionSpan
from drivetrain.types.weights import DiskSource, WeightUpdateRequest
from drivetrain_conformance.assertions.same_answers import check_greedy, check_same, gaps
from drivetrain_conformance.assets.weight_sources import nowhere, raw_bytes
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.references.oracle import CacheOracle, log_softmax

_E = TypeVar("_E", bound=BaseException)

NEW: Final = "new"
"""The version of most updates."""
TOKENS: Final = 300
"""Of a request that is in flight while weights change."""


# Refusals --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Caught(Generic[_E]):
    """What :func:`raises` caught."""

    caught: _E | None = None

    @property
    def error(self) -> _E:
        """The error; only after the block."""
        assert self.caught is not None
        return self.caught


@contextmanager
def raises(kind: type[_E] | tuple[type[_E], ...], what: str) -> Iterator[Caught[_E]]:
    """Expect ``what`` to end in an error of this kind; others go on, and UnsupportedCapability always."""
    found: Caught[_E] = Caught()
    try:
        yield found
    except UnsupportedCapability:
        raise
    except kind as error:
        found.caught = error
    else:
        raise AssertionError(f"{what} was accepted")


# What is served --------------------------------------------------------------------------------------------------


def check_state(engine: InferenceEngine, state: EngineState, when: str = "") -> None:
    """Raise unless the engine is in this state."""
    assert engine.state is state, f"it is {engine.status.describe()}, not {state.value} {when}"


def check_made_by(
    bench: Bench, completions: Sequence[Completion], model: Path, engine: InferenceEngine | None = None
) -> None:
    """Raise unless every token of these greedy completions is the choice of ``model``."""
    for completion in completions:
        check_greedy(bench, completion, engine, model)


async def check_holds(engine: InferenceEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every tensor of the engine, read from all its ranks, is that of the trainer."""
    for spec in (await engine.weight_manifest()).tensors:
        read = await engine.get_weights_by_name(spec.name)
        assert read.data == raw_bytes(tensors[spec.name]), f"{spec.name} is not what was pushed"


async def check_serves(bench: Bench, model: Path, version: str) -> None:
    """Raise unless the engine is ready, says ``version``, and answers as ``model`` and no other does."""
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
    """The greedy completion of one prompt, alone in the engine."""
    (completion,) = await bench.greedy([prompt])
    return completion


async def one_by_one(bench: Bench, prompts: Sequence[list[int]]) -> list[Completion]:
    """Greedy completions of several prompts, each alone in the engine."""
    return [await one(bench, prompt) for prompt in prompts]


@asynccontextmanager
async def unchanged(bench: Bench) -> AsyncIterator[None]:
    """Raise if what happens within changes version, state or answers."""
    engine, prompts = bench.engine, bench.prompts(2)
    version = engine.get_weight_version()
    before = await one_by_one(bench, prompts)
    yield
    check_state(engine, EngineState.READY)
    assert not engine.is_paused
    assert engine.get_weight_version() == version
    check_same(bench, await one_by_one(bench, prompts), before)


# Updates ---------------------------------------------------------------------------------------------------------


async def same_weights_again(bench: Bench) -> None:
    """Update from disk to the weights that are there, under their own version.

    It changes nothing. A body that needs more than disk updates does it first, so that an engine without them
    refuses before anything else was done to it.
    """
    await bench.engine.load_weights_from_disk(str(bench.model), bench.engine.get_weight_version())


async def same_label_again(engine: InferenceEngine) -> None:
    """Give the weights the label that they have: it changes nothing, and engines without version spans refuse."""
    await engine.update_weight_version(engine.get_weight_version())


def from_disk(model: Path, version: str = NEW, **fields: object) -> WeightUpdateRequest:
    """A request for an update from a model folder."""
    return WeightUpdateRequest.model_validate({"version": version, "source": DiskSource(path=str(model)), **fields})


async def load_all(update: WeightTransaction) -> None:
    """Load every bucket, one by one."""
    for index in range(update.buckets):
        await update.load([index])


async def check_dirty(bench: Bench, version: str) -> None:
    """Raise unless the engine serves nothing, says why, still names ``version``, and is not to be talked round."""
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
    """Raise unless a refused update leaves a dirty engine so, and a full one mends it."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    with raises(DrivetrainError, "a folder that is not there"):
        await engine.load_weights_from_disk(str(nowhere(bench.models)), "bad")
    await check_dirty(bench, version)
    await engine.load_weights_from_disk(str(other), "recovered")
    await check_serves(bench, other, "recovered")


# Requests in flight ----------------------------------------------------------------------------------------------


class Late:
    """A request that arrives while weights change; whatever happens, it does not outlive its block."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._prompt = bench.prompt()
        self._task: asyncio.Task[Completion] | None = None

    def arrive(self) -> None:
        """Ask the engine now."""
        self._task = asyncio.create_task(one(self._bench, self._prompt))

    async def is_held(self) -> bool:
        """Whether there is no answer, though there was time for one."""
        assert self._task is not None
        await asyncio.sleep(0.05)
        return not self._task.done()

    async def completion(self) -> Completion:
        """Wait for the answer, a bounded time."""
        assert self._task is not None
        async with asyncio.timeout(60):
            return await self._task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Updated:
    """What became of requests while weights changed."""

    old: str
    """The version before."""
    completions: list[Completion]
    """Of the two requests in flight."""
    late: Completion
    """Of the request that arrived meanwhile."""


async def update_in_flight(bench: Bench, mode: PauseMode) -> Updated:
    """Update while two greedy requests, with logprobs, are under way and one arrives."""
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
        check_state(engine, EngineState.READY)
        assert not engine.is_paused, "the update left the engine paused"
        async with asyncio.timeout(60):
            completions = (await running).completions
        return Updated(old, completions, await late.completion())


def check_spans(completion: Completion, *versions: str) -> None:
    """Raise unless the spans are of these versions, each with some tokens, without a gap over all of them."""
    spans = completion.weight_versions
    assert tuple(span.version for span in spans) == versions, f"the spans are {spans}"
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1], f"the spans are {spans}"
    assert edges == sorted(set(edges)), f"the spans are {spans}"
    assert edges[-1] == len(completion.token_ids), f"the spans are {spans} of {len(completion.token_ids)} tokens"


def check_boundary(bench: Bench, completion: Completion, old: Path, new: Path, *, recomputed: bool = True) -> None:
    """Raise unless the tokens of the first span are greedy choices of ``old`` and those of the second of ``new``.

    After a cache that was not recomputed they are no model's own, but they are not those of ``old`` either.
    """
    end = completion.weight_versions[0].end
    by_old, by_new = gaps(bench, completion, old), gaps(bench, completion, new)
    tolerance = bench.tolerance()
    assert by_old[:end].max() <= tolerance, "a token of the first span was not made by the old weights"
    assert by_old[end:].max() > tolerance, "the tokens of the second span are still those of the old weights"
    if recomputed:
        assert by_new[end:].max() <= tolerance, "a token of the second span was not made by the new weights"


def check_logprobs(bench: Bench, completion: Completion, model: Path, span: VersionSpan) -> None:
    """Raise unless the logprobs of the span's tokens are those that ``model`` gives them after all before them."""
    assert completion.logprobs is not None
    expected = bench.output_logprobs(completion, model=model)
    off = np.abs(np.subtract(completion.logprobs, expected))[span.start : span.end]
    assert _are_close(bench, off), (
        f"the logprob of token {span.start + int(off.argmax())} is {off.max():.3g} nats from that of the model in "
        f"{model.name}"
    )


def _are_close(bench: Bench, off: np.ndarray) -> bool:
    """Return True if these gaps are rounding alone: of some hundred in bfloat16, one lies beyond the tolerance."""
    return bool(np.quantile(off, 0.99) <= bench.tolerance() and off.max() <= 2 * bench.tolerance())


def check_kept_cache(bench: Bench, completion: Completion, old: Path, new: Path) -> None:
    """Raise unless the second span's logprobs are those of ``new`` on the KV cache that ``old`` had made.

    They show from which token on the weights were new, and that the cache was kept.
    """
    later, end = bench.oracle(new), completion.weight_versions[0].end
    if not isinstance(later, CacheOracle):
        return
    assert completion.logprobs is not None
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    # The last token of the old weights is read by the new ones.
    cached = len(completion.prompt_token_ids) + end - 1
    rows = log_softmax(later.logits_on_the_cache_of(bench.oracle(old), ids, cached))[:-1]
    expected = rows[np.arange(len(rows)), completion.token_ids[end:]]
    off = np.abs(np.subtract(completion.logprobs[end:], expected))
    assert _are_close(bench, off), (
        f"the logprob of token {end + int(off.argmax())} is {off.max():.3g} nats from that of the new weights, which "
        f"took over with token {end}, on the cache that the old ones had made"
    )


def check_late(bench: Bench, updated: Updated) -> None:
    """Raise unless the request that arrived meanwhile is of the new version alone."""
    check_spans(updated.late, NEW)
    check_made_by(bench, [updated.late], bench.other_weights())
