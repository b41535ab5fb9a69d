"""Compare completions with the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.types.outputs import Completion
from drivetrain_conformance.check.reference import Reference, Scores
from drivetrain_conformance.references.tolerances import ROUGHEST, rounding_explains


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between an engine and the reference."""

    off: NDArray[np.float64]
    """For each token: the absolute difference of its logprob in nats, or its distance from the most likely token."""
    context: NDArray[np.int64]
    """For each token: the number of tokens before it."""
    tolerance: float
    fault: str = ""
    """Anything else that is wrong."""
    plain: float | None = None
    """Root mean square of the differences that transformers has in the engine's dtype; None: not computed."""

    @property
    def agrees(self) -> bool:
        """True if rounding explains every difference."""
        if self.fault or not self.off.size or not rounding_explains(self.off, self.tolerance):
            return False
        return self.plain is None or self.times_plain <= ROUGHEST

    @property
    def root_mean_square(self) -> float:
        """The root mean square of all differences."""
        return _root_mean_square(self.off)

    @property
    def times_plain(self) -> float:
        """The root mean square, as a multiple of transformers' own in the engine's dtype."""
        return self.root_mean_square / (self.plain or 1.0)

    @property
    def worst(self) -> float:
        """The largest difference."""
        return float(self.off.max()) if self.off.size else 0.0

    @property
    def seen(self) -> str:
        """The figures in words."""
        if self.fault or not self.off.size:
            return self.fault or "no tokens to compare"
        if self.plain is not None:
            return f"errors {self.gap}, {self.root_mean_square:.2g} nats rms, {self.off.size} tokens"
        return f"worst {self.worst:.2g}, mean {self.off.mean():.2g} nats, {self.off.size} tokens"

    @property
    def gap(self) -> str:
        """The figure that decides, in words."""
        if self.plain is None:
            return f"{self.worst:.2g} nats"
        return f"{self.times_plain:.2f} times plain ones"

    @property
    def right_up_to(self) -> int:
        """The most tokens of context below the first difference beyond the tolerance; 0 if there is none."""
        wrong = self.context[self.off > self.tolerance]
        right = self.context[self.context < wrong.min()] if wrong.size else wrong
        return int(right.max()) if right.size else 0

    @property
    def against(self) -> str:
        """The tolerance in words: 1 in 100 tokens may be off by up to twice as much."""
        return f"{self.tolerance:g} nats" if self.plain is None else f"{ROUGHEST:g} times plain ones"


async def compare(
    completions: Sequence[Completion],
    reference: Reference,
    tolerance: float,
    *,
    greedy: bool = False,
    of_prompts: bool = False,
    plain_dtype: str | None = None,
) -> Comparison:
    """Compare logprobs with the reference's for the same tokens.

    Args:
        completions: The engine's answers, with logprobs if it can give them.
        reference: The reference.
        tolerance: The tolerance of the engine's dtype, in nats.
        greedy: Also compare each token with the most likely one; the larger of the two differences counts.
        of_prompts: Compare the logprobs of the prompts instead.
        plain_dtype: Also compute how far transformers is off in this dtype, as a yardstick.
    """
    parts: list[NDArray[np.float64]] = [np.zeros(0)]
    plain: list[NDArray[np.float64]] = [np.zeros(0)]
    contexts: list[int] = []
    for completion in completions:
        before, ids = len(completion.prompt_token_ids), [*completion.prompt_token_ids, *completion.token_ids]
        scores = await asyncio.to_thread(reference.score, ids)
        compared = slice(0, before - 1) if of_prompts else slice(before - 1, len(ids) - 1)
        if of_prompts:
            off = _differences((completion.prompt_logprobs or [])[1:], scores, compared)
        else:
            off = _of_output(completion, scores, compared, greedy=greedy)
        if off is None:
            return Comparison(
                np.zeros(0), np.zeros(0, np.int64), tolerance, "the engine gave no logprob for some tokens"
            )
        parts.append(off)
        if plain_dtype is not None:
            rounded = await asyncio.to_thread(reference.score, ids, plain_dtype)
            plain.append((rounded.own - scores.own)[compared])
        first = 1 if of_prompts else before
        contexts += range(first, first + len(off))
    off = np.nan_to_num(np.concatenate(parts), nan=np.inf)
    yardstick = None if plain_dtype is None else _root_mean_square(np.concatenate(plain))
    return Comparison(off, np.array(contexts, dtype=np.int64), tolerance, plain=yardstick)


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _of_output(completion: Completion, scores: Scores, own: slice, *, greedy: bool) -> NDArray[np.float64] | None:
    lag = scores.best[own] - scores.own[own] if greedy else np.zeros(len(completion.token_ids))
    if completion.logprobs is None and greedy:
        return lag
    off = _differences(completion.logprobs or [], scores, own)
    return None if off is None else np.maximum(off, lag)


def _differences(engines: Sequence[float | None], scores: Scores, tokens: slice) -> NDArray[np.float64] | None:
    """Return absolute differences, or None if the engine did not give a number for each token."""
    expected = scores.own[tokens]
    if len(engines) != len(expected) or any(number is None for number in engines):
        return None
    return np.abs(np.array(engines, dtype=np.float64) - expected)
