"""Compute the distribution that each token is drawn from with numpy, from the model's logits, one token at a time.

The order is that of :class:`~drivetrain.types.sampling.SamplingParams`: logit processors, repetition, frequency and
presence penalty, logit bias, temperature, top-k, top-p over the tokens that top-k keeps, min-p over the tokens that
top-p keeps. Among equally likely tokens the lower id comes first. Before ``min_new_tokens``, the stop ids that the
caller names cannot be drawn. Grammars are not covered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import ActionMask, DisallowedTokens, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.references.oracle import Logits, log_softmax

Mask = NDArray[np.bool_]

FLAT: Final = 1000.0
"""A temperature at which all tokens are about as likely, so that draws depend on the seed and the place alone."""
_FILTERS_OFF: Final[dict[str, float]] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_MIN_P: Final = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class Step:
    """The distribution of one token. All arrays have shape (vocabulary,)."""

    raw: Logits
    """Logprobs of the model's own distribution."""
    tempered: Logits
    """Logprobs after temperature alone; raw when greedy."""
    scaled: Logits
    """Logits after all steps except top-k, top-p and min-p; when greedy, the logits whose largest is taken."""
    kept: Mask
    """Tokens that can be drawn."""
    surely: Mask
    """Tokens that can be drawn for any error of the logits within the slack."""
    possibly: Mask
    """Tokens that can be drawn for some error of the logits, within the slack."""

    @property
    def is_clear(self) -> bool:
        """True if no rounding within the slack changes which tokens can be drawn."""
        return bool((self.surely == self.possibly).all())

    @property
    def probabilities(self) -> Logits:
        """The distribution that is drawn from."""
        return np.asarray(np.exp(self.processed))

    @property
    def processed(self) -> Logits:
        """Logprobs of that distribution; minus infinity for tokens that cannot be drawn."""
        return log_softmax(np.where(self.kept, self.scaled, -np.inf))

    def lag(self, token: int) -> float:
        """Return how many nats less likely ``token`` is than the most likely one, before top-k, top-p and min-p."""
        return float(self.scaled.max() - self.scaled[token])

    def check_drawn(self, token: int, params: SamplingParams, slack: float, of: str) -> None:
        """Raise unless ``token`` could be drawn, or when greedy, is the most likely one within ``slack`` nats.

        ``of`` names the token in the error.
        """
        if params.temperature > 0:
            assert self.possibly[token], f"{of} cannot be drawn by {params}"
            return
        assert self.lag(token) <= slack, (
            f"{of} is {self.lag(token):.3g} nats below the most likely one, {int(self.scaled.argmax())}"
        )

    def logprobs(self, mode: LogprobsMode) -> Logits:
        """Return the logprobs of all tokens in this mode."""
        match mode:
            case LogprobsMode.RAW:
                return self.raw
            case LogprobsMode.TEMPERATURE:
                return self.tempered
            case LogprobsMode.PROCESSED:
                return self.processed

    def bounds(self, mode: LogprobsMode, token: int) -> tuple[float, float]:
        """Return the least and the greatest logprob of ``token``: rounding may change which tokens are kept."""
        if mode is not LogprobsMode.PROCESSED:
            return float(self.logprobs(mode)[token]), float(self.logprobs(mode)[token])
        own = float(self.scaled[token])
        surely = self.scaled[self.surely] if self.surely.any() else self.scaled.max(keepdims=True)
        return own - _log_sum_exp(self.scaled[self.possibly]), own - _log_sum_exp(surely)


def steps(
    completion: Completion, logits: Logits, params: SamplingParams, tolerance: float, stops: Sequence[int] = ()
) -> Iterator[Step]:
    """Yield the distribution of each token of a completion.

    Args:
        completion: A completion that was drawn with ``params``.
        logits: The model's logits for each of its tokens, shape (tokens, vocabulary).
        params: The sampling parameters.
        tolerance: Allowed difference of the engine's logprobs from those of ``logits``, in nats.
        stops: Ids that end the request, EOS ids included; needed with ``min_new_tokens``.
    """
    for index, row in enumerate(logits):
        yield step(row, params, completion.prompt_token_ids, completion.token_ids[:index], tolerance, stops)


def step(
    logits: Logits,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    tolerance: float,
    stops: Sequence[int] = (),
) -> Step:
    """Return the distribution of the token after ``prompt`` and ``generated``, given the model's ``logits`` for it.

    ``stops`` are the ids that cannot be drawn before ``min_new_tokens``.
    """
    temperature = params.temperature or 1.0
    adjusted = _adjusted(logits, params, prompt, generated)
    if len(generated) < params.min_new_tokens:
        adjusted[list(stops)] = -np.inf
    scaled = adjusted / temperature
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
    second, best = np.sort(scaled)[-2:]
    surely[scaled.argmax()] |= best > second + slack
    return Step(raw, tempered, scaled, kept, surely, possibly & (scaled > -np.inf))


def with_effective_filters(params: SamplingParams, prompts: Sequence[Sequence[int]], logits: Logits) -> SamplingParams:
    """Set top-k, top-p and min-p such that each rules out tokens that the other two would leave.

    Otherwise an engine that forgets one of them could not be told from one that honours all.

    Args:
        params: The other fields.
        prompts: The prompts, as token ids.
        logits: The model's logits for the token after each prompt, shape (prompts, vocabulary).
    """

    def kept(fields: dict[str, float]) -> list[bytes]:
        one = params.model_copy(update=fields)
        scaled = (_adjusted(row, one, prompt, []) for row, prompt in zip(logits, prompts, strict=True))
        return [_kept(row / (one.temperature or 1.0), one).tobytes() for row in scaled]

    def effective(fields: dict[str, float]) -> int:
        """Return the number of prompts that the least effective of the three filters changes."""
        together = kept(fields)
        without = (kept({**fields, name: off}) for name, off in _FILTERS_OFF.items())
        return min(sum(one != other for one, other in zip(together, left, strict=True)) for left in without)

    choices = ({"top_k": k, "top_p": p, "min_p": m} for k in (40, 20, 10) for p in (0.9, 0.75) for m in _MIN_P)
    return params.model_copy(update=max(choices, key=effective))


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
    """Return the temperature of the token at ``index``: ``start`` at 0, ``end`` from ``steps - 1`` on."""
    last = schedule.steps - 1
    share = min(index, last) / last if last else 1.0
    return schedule.start + (schedule.end - schedule.start) * share


def _kept(scaled: Logits, params: SamplingParams, looser: float = 0.0) -> Mask:
    """Return the tokens that top-k, then top-p, then min-p keep; ``looser`` loosens the latter two, in nats."""
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
    # With min_p = 1 and a negative ``looser`` nothing is left, but the most likely token can always be drawn.
    kept[order] = True
    kept[scaled.argmax()] = True
    return kept


def _log_sum_exp(values: Logits) -> float:
    largest = float(values.max())
    return largest + math.log(float(np.exp(values - largest).sum()))
