"""Scores of given sequences, as a teacher gives them: logprobs at given ids, those of an independent forward pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.token_scores import TokenScores
from drivetrain_conformance.assertions.pooled_inputs import many_lengths
from drivetrain_conformance.assertions.same_answers import check_greedy
from drivetrain_conformance.assets.made_adapters import has_layers, make_adapter, merge
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.harness.time_limits import within
from drivetrain_conformance.references.oracle import Logits, check_prompt_ranks, check_top, log_softmax

_NEEDS: Final = (Capability.SCORE_TOKENS, Capability.SCORE_AT)
_CHUNKED: Final = {"max_num_batched_tokens": 128, "max_num_seqs": 16}
_ADAPTERS: Final = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
_WHOLE_CONTEXT: Final = 4096
"""Longest context that is filled to its end."""
_BOUND: Final = 120.0
"""Timeout, in seconds, for requests beside each other."""
_UPDATES: Final = 5
"""Updates of which each is made while sequences are scored, at another moment of their call."""
_LOOKED_AT: Final = 12
"""Sequences, first and last of a call, whose scores are compared."""


@dataclass(slots=True)
class _Call:
    """Sequences to score with one call."""

    bench: Bench
    sequences: list[list[int]]
    widths: Sequence[int] = (5,)
    """Number of given ids per position, by sequence in turn; 0 for all: none are given."""
    temperature: float | None = None
    last_n: int | list[int] | None = None
    top_k: int = 0
    model: Path | None = None
    """Folder of the model that the scores must be of; None: the engine's."""
    lora: str | None = None
    sampling: Mapping[str, object] | None = None
    """Sampling params of the tokens that are generated after each sequence; None: no token is."""

    def counts(self) -> list[int]:
        """Return the number of positions of each sequence."""
        if self.last_n is None:
            return list(map(len, self.sequences))
        return [self.last_n] * len(self.sequences) if isinstance(self.last_n, int) else self.last_n

    def given(self) -> list[NDArray[np.int64]] | None:
        """Return ids for each sequence, spread over the whole vocabulary, some of them twice."""
        if not any(self.widths):
            return None
        rng, vocabulary = np.random.default_rng(self.bench.rng.getrandbits(32)), self.bench.engine.model_info.vocab_size
        given = []
        for index, count in enumerate(self.counts()):
            ids = rng.integers(0, vocabulary, size=(count, self.widths[index % len(self.widths)]))
            ids[0, 0], ids[-1, -1] = 0, vocabulary - 1
            given.append(ids)
        return given

    async def check(self) -> list[Completion]:
        """Make the call, check everything that comes back, and return the completions."""
        given = self.given()
        output = await self.bench.engine.compute_logprobs(
            self.sequences,
            at=given,
            temperature=self.temperature,
            last_n=self.last_n,
            top_k=self.top_k,
            sampling_params=self.sampling,
            lora=self.lora,
        )
        first = [completion for completion in output.completions if completion.sample_index == 0]
        assert len(first) == len(self.sequences)
        for index, (completion, count) in enumerate(zip(first, self.counts(), strict=True)):
            assert completion.prompt_token_ids == self.sequences[index]
            if self.sampling is None:
                assert completion.token_ids == [], "tokens were sampled"
                assert completion.finish_reason is FinishReason.LENGTH
            self._check(
                _scores(completion), completion.prompt_token_ids, count, None if given is None else given[index]
            )
        return output.completions

    def _check(self, scores: TokenScores, ids: list[int], count: int, given: NDArray[np.int64] | None) -> None:
        temperature = 1.0 if self.temperature is None else self.temperature
        assert scores.temperature == temperature
        _assert_shape("token_logprobs", scores.token_logprobs, np.float32, count)
        width = 0 if given is None else given.shape[1]
        _assert_shape("at_logprobs", scores.at_logprobs, np.float32, count, width)
        _assert_shape("top_logprobs", scores.top_logprobs, np.float32, count, self.top_k)
        _assert_shape("top_ids", scores.top_ids, np.int32, count, self.top_k)
        missing = count - min(count, len(ids) - 1)
        arrays = (scores.token_logprobs, scores.at_logprobs, scores.top_logprobs)
        assert all(np.isnan(array[:missing]).all() for array in arrays), "the first token came with a logprob"
        assert (scores.top_ids[:missing] == -1).all()
        if count == missing:
            return
        reference = _Reference(self.bench, ids, temperature, count - missing, self.model)
        own = np.array(ids[len(ids) - count + missing :])[:, None]
        reference.check("its own token", own, scores.token_logprobs[missing:, None])
        if given is not None:
            reference.check("a given id", given[missing:], scores.at_logprobs[missing:])
        if self.top_k:
            reference.check_top(scores.top_ids[missing:], scores.top_logprobs[missing:])


def _scores(completion: Completion) -> TokenScores:
    assert completion.scores is not None, "a completion came without scores"
    return completion.scores


async def _check_prompt_logprobs(bench: Bench, sequences: list[list[int]]) -> None:
    """Check long sequences' own logprobs beside their scores."""
    asked = {"temperature": 0, "max_new_tokens": 1, "prompt_logprobs": 1}
    plain = (await bench.engine.generate(sequences, asked)).completions
    scored = await _Call(bench, sequences, last_n=127, sampling=asked).check()
    for completion, expected in zip(scored, plain, strict=True):
        _assert_prompt_logprobs(bench, completion, expected)


def _assert_prompt_logprobs(bench: Bench, completion: Completion, expected: Completion) -> None:
    """Assert that a prompt's own logprobs came beside its scores as they come without, and are the reference's."""
    found, wanted = completion.prompt_logprobs, expected.prompt_logprobs
    assert found is not None, "no prompt_logprobs came beside scores"
    assert wanted is not None
    assert len(found) == len(wanted)
    assert found[0] is None
    assert (completion.prompt_top_logprobs is None) == (expected.prompt_top_logprobs is None)
    assert (completion.prompt_ranks is None) == (expected.prompt_ranks is None), "no prompt_ranks came beside scores"
    off = [abs((one or 0.0) - (other or 0.0)) for one, other in zip(found, wanted, strict=True)]
    assert max(off) <= 2 * bench.tolerance(), f"a prompt token's logprob differs by {max(off):.3g} nats beside scores"
    rows = log_softmax(bench.oracle().logits(completion.prompt_token_ids))
    if completion.prompt_ranks is not None:
        check_prompt_ranks(completion.prompt_ranks, completion.prompt_token_ids, rows, bench.tolerance())
    tops = zip(completion.prompt_top_logprobs or (), expected.prompt_top_logprobs or (), strict=True)
    for at, (one, other) in enumerate(tops):
        assert (one is None) == (other is None) == (at == 0)
        if one is not None and other is not None:
            check_top(one, rows[at - 1], len(other), bench.tolerance(), f"prompt token {at} beside scores")


def _assert_shape(name: str, array: NDArray[np.generic], dtype: type[np.generic], *shape: int) -> None:
    assert array.shape == shape, f"{name} has the shape {array.shape}, not {shape}"
    assert array.dtype == dtype, f"{name} has the dtype {array.dtype}, not {np.dtype(dtype)}"


@dataclass
class _Reference:
    """Logprobs of the last positions of a sequence, as the oracle computes them."""

    bench: Bench
    token_ids: list[int]
    temperature: float
    count: int
    model: Path | None

    @cached_property
    def logprobs(self) -> Logits:
        """Shape (count, vocabulary)."""
        rows = self.bench.oracle(self.model).logits(self.token_ids)
        return log_softmax(rows[-1 - self.count : -1] / self.temperature)

    @property
    def tolerance(self) -> float:
        """Allowed difference of a logprob, in nats."""
        return self.bench.tolerance() / min(1.0, self.temperature)

    def check(self, what: str, ids: NDArray[np.integer], found: NDArray[np.float32]) -> None:
        """Assert that these ids' logprobs are the reference's; both of shape (count, ids)."""
        expected = np.take_along_axis(self.logprobs, ids, axis=1)
        off = np.abs(found - expected)
        row, column = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), off.shape)
        assert off[row, column] <= self.tolerance, (
            f"token {row - self.count} of {len(self.token_ids)}: the logprob of {what} ({ids[row, column]}) at "
            f"temperature {self.temperature:g} is {found[row, column]:.5f}, not {expected[row, column]:.5f}"
        )

    def check_top(self, ids: NDArray[np.int32], found: NDArray[np.float32]) -> None:
        """Assert that these are the likeliest ids, likeliest first; both of shape (count, top_k)."""
        self.check("a likely token", ids, found)
        assert all(len(set(row)) == len(row) for row in ids.tolist()), "a likely token is named twice"
        assert (np.diff(found, axis=1) <= 0).all(), "the likeliest token is not first"
        best = -np.sort(-self.logprobs, axis=1)[:, : ids.shape[1]]
        worst = float(np.abs(found - best).max())
        assert worst <= 2 * self.tolerance, f"a token that is {worst:.3g} nats likelier is missing"


# The numbers ---------------------------------------------------------------------------------------------------------


@case(*_NEEDS)
async def given_ids_are_scored_at_each_position(bench: Bench) -> None:
    """Sequences of different lengths, up to the whole context, get the logprob of each given id at each position.

    A sequence's first token has no logprobs, and no token is sampled.
    """
    context = bench.engine.model_info.context_length
    lengths = (1, 2, 3, 17, 40, min(context, _WHOLE_CONTEXT))
    await _Call(bench, [bench.prompt(length) for length in lengths], widths=(3, 8, 1)).check()


@case(*_NEEDS)
async def scores_are_of_the_temperature(bench: Bench) -> None:
    """Scores are those of the logits divided by the temperature, below 1 and above, also beside each other."""
    calls = [
        _Call(bench, [bench.prompt(length) for length in (5, 23)], temperature=temperature, top_k=3)
        for temperature in (0.5, 1.0, 2.0)
    ]
    for call in calls:
        await call.check()
    async with within(seconds=_BOUND):
        await asyncio.gather(*(call.check() for call in calls))


@case(*_NEEDS)
async def only_the_last_positions_are_scored(bench: Bench) -> None:
    """last_n, one number for all sequences or one for each, selects that many last tokens, from one to all of them."""
    lengths = (6, 19, 45)
    sequences = [bench.prompt(length) for length in lengths]
    for last_n in (1, 4, 6, [1, 19, 30]):
        await _Call(bench, sequences, last_n=last_n, top_k=2).check()
    await _Call(bench, sequences, widths=(0,), last_n=[6, 18, 45]).check()


@case(*_NEEDS)
async def scores_name_the_likeliest_tokens(bench: Bench) -> None:
    """top_k returns the likeliest ids of each position with their logprobs, with given ids and without."""
    sequences = [bench.prompt(length) for length in (2, 12, 31)]
    await _Call(bench, sequences, top_k=7).check()
    await _Call(bench, sequences, widths=(0,), top_k=1, temperature=0.8).check()


@case(*_NEEDS)
async def tokens_come_with_scores(bench: Bench) -> None:
    """compute_logprobs(sampling_params=) generates after each sequence and scores it, in one request of the engine.

    The first of n completions of a sequence has the scores; stops on text leave them whole. The same request returns
    the sequence's own logprobs too if it asks for prompt_logprobs.
    """
    sequences = [bench.prompt(length) for length in (1, 9, 34)]
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}
    for n in (1, 3):
        completions = await _Call(bench, sequences, top_k=2, temperature=0.7, sampling={**greedy, "n": n}).check()
        assert [one.scores is None for one in completions] == [index % n > 0 for index in range(n * len(sequences))]
        for completion in completions:
            assert len(completion.token_ids) == 6, f"{len(completion.token_ids)} tokens came beside scores, not 6"
            assert completion.logprobs is not None
            check_greedy(bench, completion)
    if bench.claims(Capability.STOP_REGEX):
        for completion in await _Call(bench, sequences, sampling={**greedy, "stop_regex": "(?s)."}).check():
            assert completion.finish_reason is FinishReason.STOP, f"it ended by {completion.finish_reason.value}"
    if bench.claims(Capability.PROMPT_LOGPROBS):
        for count in (0, 3):
            asked = {**greedy, "prompt_logprobs": count, "return_prompt_ranks": bench.claims(Capability.PROMPT_RANKS)}
            plain = (await bench.engine.generate(sequences, asked)).completions
            for last_n, temperature in ((1, 0.7), ([1, 5, 34], None)):
                call = _Call(bench, sequences, last_n=last_n, top_k=2, temperature=temperature, sampling=asked)
                for completion, expected in zip(await call.check(), plain, strict=True):
                    assert completion.token_ids == expected.token_ids, "scores changed the tokens"
                    _assert_prompt_logprobs(bench, completion, expected)


@case(*_NEEDS)
async def a_teacher_scores_what_a_student_finds_likely(bench: Bench) -> None:
    """The likeliest ids of one call, given to the next one as ``at``, get the same logprobs."""
    sequences = [bench.prompt(length) for length in (8, 21)]
    student = (await bench.engine.compute_logprobs(sequences, last_n=7, top_k=16)).completions
    ids = [_scores(completion).top_ids for completion in student]
    teacher = (await bench.engine.compute_logprobs(sequences, at=ids, last_n=7)).completions
    for one, other in zip(student, teacher, strict=True):
        off = float(np.abs(_scores(one).top_logprobs - _scores(other).at_logprobs).max())
        assert off <= 2 * bench.tolerance(), f"the same id's logprob differs by {off:.3g} nats between two calls"


# Beside other requests -----------------------------------------------------------------------------------------------


@case(*_NEEDS)
async def many_scores_share_batches_with_other_requests(bench: Bench) -> None:
    """Calls that ask for different scores, many at once, all get their own while other requests generate."""
    calls = [
        _Call(bench, bench.prompts(3, length), widths=(width,), temperature=temperature, last_n=last_n, top_k=top_k)
        for length, width, temperature, last_n, top_k in (
            (4, 2, 0.7, None, 0),
            (30, 6, None, 12, 2),
            (9, 0, 1.3, 9, 4),
            (61, 1, None, 1, 0),
        )
    ]
    async with bench.in_flight(bench.prompts(4), bench.long(250)) as task, within(seconds=_BOUND):
        for _ in range(2):
            await asyncio.gather(*(call.check() for call in calls), _answer(bench))
        for completion in (await task).completions:
            check_greedy(bench, completion)


async def _answer(bench: Bench) -> None:
    for completion in await bench.greedy(bench.prompts(2)):
        check_greedy(bench, completion)


@case(*_NEEDS, Capability.PREFIX_CACHE)
async def cached_prefixes_lose_no_position(bench: Bench) -> None:
    """Sequences whose prefix is cached get the scores of all positions that were asked for, again and again."""
    length = min(200, bench.engine.model_info.context_length - 20)
    sequences = bench.prompts(2, length)
    await bench.greedy(sequences)
    for _ in range(2):
        await _Call(bench, sequences, top_k=1).check()
        await _Call(bench, sequences, last_n=[length // 2, 3]).check()
    longer = [[*sequence, *bench.prompt(9)] for sequence in sequences]
    await _Call(bench, [*longer, *sequences], last_n=9).check()
    for completion in await bench.greedy(longer):
        check_greedy(bench, completion)


@case(*_NEEDS, config=_CHUNKED, slow=True)
async def sequences_of_many_chunks_are_scored_whole(bench: Bench) -> None:
    """Sequences longer than a chunk of the prefill get all their scores, wherever a chunk begins and ends."""
    lengths = [length for length in (127, 128, 129, 256, 257, 300) if length <= bench.engine.model_info.context_length]
    sequences = [bench.prompt(length) for length in lengths]
    await _Call(bench, sequences, widths=(2, 3), top_k=1).check()
    await _Call(bench, sequences, last_n=127, temperature=0.9).check()
    await _Call(bench, sequences, last_n=[min(length, 170) for length in lengths], top_k=2).check()
    if bench.claims(Capability.PROMPT_LOGPROBS):
        await _check_prompt_logprobs(
            bench, [one for one in sequences if len(one) < bench.engine.model_info.context_length]
        )


# Weights and adapters ------------------------------------------------------------------------------------------------


@case(*_NEEDS, Capability.WEIGHTS_DISK, changes_weights=True, slow=True)
async def scores_are_of_the_weights_that_are_served(bench: Bench) -> None:
    """After a weight update, scores are those of the new weights, also of sequences that were scored before.

    Scores of a call during an update are those of the version that each completion names.
    """
    engine, sequences = bench.engine, [bench.prompt(length) for length in (7, 40)]
    await _Call(bench, sequences, top_k=2).check()
    await engine.load_weights_from_disk(str(bench.other_weights()), "other")
    await _Call(bench, sequences, top_k=2, model=bench.other_weights()).check()
    mode = PauseMode.RETRACT if bench.claims(Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT) else PauseMode.WAIT
    models, times, seconds = {"other": bench.other_weights()}, 2, 0.0
    for number in range(_UPDATES):
        asked = [bench.prompt(length) for length in times * many_lengths(bench)]
        version, model = f"while-{number}", (bench.model, bench.other_weights())[number % 2]
        models[version] = model
        began = time.monotonic()
        scoring = asyncio.create_task(engine.compute_logprobs(asked, last_n=2))
        await asyncio.sleep(bench.rng.random() * seconds / 2)
        await engine.load_weights_from_disk(str(model), version, mode=mode)
        if scoring.done():
            times *= 2  # the next call should outlast its update
        async with within(seconds=_BOUND):
            completions = (await scoring).completions
        seconds = time.monotonic() - began
        for completion in (*completions[:_LOOKED_AT], *completions[-_LOOKED_AT:]):
            named, own = completion.weight_version, np.array(completion.prompt_token_ids[-2:])[:, None]
            assert named in models, f"a sequence was scored, and its weight version is {named!r}"
            reference = _Reference(bench, completion.prompt_token_ids, 1.0, 2, models[named])
            reference.check(f"its own token by {named!r}", own, _scores(completion).token_logprobs[:, None])


@case(*_NEEDS, Capability.LORA, config=_ADAPTERS)
async def scores_are_of_the_adapter(bench: Bench) -> None:
    """compute_logprobs(lora=) scores with that adapter, beside calls without one.

    So it does with an adapter of the model's head, if the engine takes one.
    """
    sequences = [bench.prompt(length) for length in (3, 26)]
    for targets in (("q_proj", "v_proj"), ("v_proj", "lm_head")):
        if not has_layers(bench.model, targets):
            continue
        adapter = make_adapter(bench.model, bench.folder("adapter"), seed=1, targets=targets)
        merged = merge(bench.model, adapter, bench.folder("merged"))
        try:
            await bench.engine.load_lora_adapter("a", str(adapter.path))
        except InvalidRequest:
            if "lm_head" not in targets:
                raise
            continue
        try:
            await _Call(bench, sequences, model=merged, lora="a", temperature=0.8, top_k=2).check()
            async with within(seconds=_BOUND):
                await asyncio.gather(
                    _Call(bench, sequences, model=merged, lora="a", last_n=3).check(),
                    _Call(bench, sequences, last_n=3).check(),
                )
        finally:
            await bench.engine.unload_lora_adapter("a")
