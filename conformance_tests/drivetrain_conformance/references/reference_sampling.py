"""The distribution that a token is drawn from, worked out from the model's logits with numpy, one token at a time.

The order is that of :class:`~drivetrain.types.sampling.SamplingParams`: logit processors, repetition, frequency and
presence penalty, logit bias, temperature, top-k, top-p over what top-k left, min-p over what top-p left. Of equally
likely tokens the one with the lower id comes first. ``min_new_tokens`` and grammars are no part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import ActionMask, DisallowedTokens, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.references.oracle import Logits, log_softmax

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Step:
    """What one token was drawn from. All arrays have shape (vocabulary,)."""

    raw: Logits
    """Logprobs of the model's own distribution."""
    tempered: Logits
    """Logprobs after temperature alone; raw when greedy."""
    scaled: Logits
    """Logits after everything but top-k, top-p and min-p; when greedy, those whose largest is taken."""
    kept: Mask
    """Tokens that can be drawn."""
    surely: Mask
    """Tokens that can be drawn even if logits are off by the slack in whichever way."""
    possibly: Mask
    """Tokens that could be drawn if logits were off by the slack."""

    @property
    def is_clear(self) -> bool:
        """No rounding within the slack changes which tokens can be drawn."""
        return bool((self.surely == self.possibly).all())

    @property
    def probabilities(self) -> Logits:
        """The distribution that is drawn from."""
        return np.asarray(np.exp(self.processed))

    @property
    def processed(self) -> Logits:
        """Its logprobs; minus infinity for tokens that cannot be drawn."""
        return log_softmax(np.where(self.kept, self.scaled, -np.inf))

    def bounds(self, mode: LogprobsMode, token: int) -> tuple[float, float]:
        """The least and the most that ``token``'s logprob may be, rounding in which tokens are kept allowed for."""
        match mode:
            case LogprobsMode.RAW:
                return float(self.raw[token]), float(self.raw[token])
            case LogprobsMode.TEMPERATURE:
                return float(self.tempered[token]), float(self.tempered[token])
            case LogprobsMode.PROCESSED:
                own = float(self.scaled[token])
                return own - _log_sum_exp(self.scaled[self.possibly]), own - _log_sum_exp(self.scaled[self.surely])


def steps(completion: Completion, logits: Logits, params: SamplingParams, tolerance: float) -> Iterator[Step]:
    """What each token of a completion was drawn from.

    Args:
        completion: One that was drawn with ``params``.
        logits: The model's, for each of its tokens, shape (tokens, vocabulary).
        params: How it was drawn.
        tolerance: How far the engine's logprobs may be from those of ``logits``, in nats.
    """
    for index, row in enumerate(logits):
        yield step(row, params, completion.prompt_token_ids, completion.token_ids[:index], tolerance)


def step(
    logits: Logits, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], tolerance: float
) -> Step:
    """What the token after ``prompt`` and ``generated`` is drawn from, given the model's ``logits`` for it."""
    temperature = params.temperature or 1.0
    scaled = _adjusted(logits, params, prompt, generated) / temperature
    raw, tempered = log_softmax(logits), log_softmax(logits / temperature)
    if params.temperature == 0:
        kept = np.zeros(len(scaled), dtype=np.bool_)
        kept[scaled.argmax()] = True
        return Step(raw, tempered, scaled, kept, kept, kept)
    slack = 2 * tolerance / temperature
    kept = _kept(scaled, params)
    most = _kept(scaled, params, looser=slack)
    least = _kept(scaled, params, looser=-slack)
    possibly = scaled >= scaled[most].min() - slack
    surely = least if least.all() else least & (scaled > scaled[~least].max() + slack)
    surely[scaled.argmax()] = True
    return Step(raw, tempered, scaled, kept, surely, possibly & (scaled > -np.inf))


def _adjusted(logits: Logits, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> Logits:
    values = np.array(logits, dtype=np.float64)
    for processor in params.logit_processors:
        match processor:
            case ActionMask():
                allowed = np.zeros(len(values), dtype=np.bool_)
                allowed[list(processor.allowed_token_ids)] = True
                values[~allowed] = -np.inf
            case DisallowedTokens():
                values[list(processor.token_ids)] = -np.inf
            case TemperatureSchedule():
                values /= scheduled_temperature(processor, len(generated))
    for token in {*prompt, *generated}:
        values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(generated).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    return values


def scheduled_temperature(schedule: TemperatureSchedule, index: int) -> float:
    """Temperature of the token at ``index``: ``start`` for the first, ``end`` from token ``steps - 1`` on."""
    last = schedule.steps - 1
    share = min(index, last) / last if last else 1.0
    return schedule.start + (schedule.end - schedule.start) * share


def _kept(scaled: Logits, params: SamplingParams, looser: float = 0.0) -> Mask:
    """Tokens that top-k, then top-p, then min-p keep; ``looser`` moves the latter two by so many nats."""
    order = np.argsort(-scaled, kind="stable")
    order = order[scaled[order] > -np.inf]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        share = np.exp(log_softmax(scaled[order]))
        order = order[np.cumsum(share) - share < params.top_p * math.exp(looser)]
    if params.min_p > 0:
        order = order[scaled[order] >= scaled[order[0]] + math.log(params.min_p) - looser]
    kept = np.zeros(len(scaled), dtype=np.bool_)
    # Where min_p is 1 and the slack is narrow not even the first is left; it always can be drawn.
    kept[order] = True
    kept[scaled.argmax()] = True
    return kept


def _log_sum_exp(values: Logits) -> float:
    largest = float(values.max())
    return largest + math.log(float(np.exp(values - largest).sum()))
