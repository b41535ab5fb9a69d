"""Samples one token for each row of a batch, each row with its own parameters and its own random stream.

The order is: logit processors, penalties, logit bias, ``min_new_tokens``, temperature, top-k, top-p over the remaining
tokens, min-p. A row's random number depends only on its seed and its number of tokens, so the rest of the batch, a
pause or a retraction does not change it. Nor does the order of a device's summation, which depends on the number of
rows: probabilities are integers, whose sum is the same in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drivetrain.types.outputs import TopLogprobs
from drivetrain.types.sampling import (
    ActionMask,
    DisallowedTokens,
    LogitProcessor,
    LogprobsMode,
    SamplingParams,
    TemperatureSchedule,
)
from drivetrain_sampling.packed_masks import pack

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
NOT_FINITE = -1
"""In place of a token id: the row's logits hold NaN or infinity."""
NO_TOKEN = -2
"""In place of a token id: masks left no token in the row."""
_LIKELIEST = 2.0**40
"""Weight of a row's likeliest token; 2**22 such weights still sum within 64 bits."""


def uniform(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return one number in [0, 1) for each (seed, step), the same on every device and in every batch.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), whose state after
    ``step`` draws can be computed without the draws.

    Args:
        seeds: int64, shape (rows,).
        steps: int64, shape (rows,).

    Returns:
        float64, shape (rows,).
    """
    bits = _mix(seeds * _GOLDEN) + (steps + 1) * _GOLDEN
    return _shift_right(_mix(bits), 11).double() * 2.0**-53


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX[0]
    bits = (bits ^ _shift_right(bits, 27)) * _MIX[1]
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


@dataclass(slots=True)
class Row:
    """Sampling state of one sample."""

    params: SamplingParams
    """Sampling parameters; ``seed`` and ``max_new_tokens`` are ignored."""
    logprobs_mode: LogprobsMode
    prompt_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    """Ids that may not be drawn before ``min_new_tokens``."""
    seed: int
    generated: list[int] = field(default_factory=list)
    """Ids drawn so far; the caller appends each drawn id."""
    resumed: int = 0
    """Number of ids at the end of the prompt that were drawn for this sample earlier, in another engine."""

    @property
    def steps(self) -> int:
        """Number of ids drawn so far, the resumed ones included."""
        return self.resumed + len(self.generated)

    def drawn(self) -> list[int]:
        """Return all ids drawn so far, the resumed ones included."""
        return [*self.prompt_token_ids[len(self.prompt_token_ids) - self.resumed :], *self.generated]


@dataclass(frozen=True, slots=True)
class Choice:
    """One step's tokens, and the logits that they were drawn from, all on the batch's device."""

    token_ids: torch.Tensor
    """int64, shape (rows,); arbitrary in a row that failed."""
    top: torch.Tensor
    """Each row's largest logit after every step but truncation; see :func:`failures_of`."""
    raw: torch.Tensor
    """The model's logits, float32, shape (rows, vocabulary)."""
    processed: torch.Tensor
    """Logits after every step; minus infinity for tokens that could not be drawn. Greedy rows take the largest."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step's tokens with the requested logprobs."""

    token_ids: list[int]
    """:data:`NOT_FINITE` or :data:`NO_TOKEN` for a row that failed."""
    logprobs: list[float] | None
    """One for each row, if any row wants logprobs."""
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    """By row, for the rows that want them."""
    masks: dict[int, bytes] = field(default_factory=dict)
    """By row, for the rows that want them: the ids that the token was drawn from, as of :meth:`Sampler.masks`."""


class Sampler:
    """Sampling parameters of a batch's rows as tensors; created again when rows join or leave."""

    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self._rows = rows
        self._device = device
        params = [row.params for row in rows]
        self.steps = self._long([row.steps for row in rows])
        self._seeds = self._long([row.seed for row in rows])
        self._greedy = self._mask([p.temperature == 0 for p in params])
        self._temperature = self._float([p.temperature or 1.0 for p in params])
        self._all_greedy = all(p.temperature == 0 for p in params)
        self._any_greedy = any(p.temperature == 0 for p in params)
        self._plain_temperature = all(p.temperature in (0.0, 1.0) for p in params)
        self._top_k = [p.top_k for p in params] if any(p.top_k for p in params) else None
        # Infinity rather than 1, so that even tokens whose weight rounds to zero are kept.
        top_p = [p.top_p if p.top_p < 1 else math.inf for p in params]
        self._top_p = self._float(top_p) if any(map(math.isfinite, top_p)) else None
        self._min_p = self._float([p.min_p for p in params]) if any(p.min_p > 0 for p in params) else None
        self._biased = [i for i, p in enumerate(params) if p.logit_bias]
        self._repetition = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
        self._counted = [i for i, p in enumerate(params) if p.frequency_penalty or p.presence_penalty]
        self._held_back = [i for i, p in enumerate(params) if p.min_new_tokens]
        self._processed = [i for i, p in enumerate(params) if p.logit_processors]
        self._modes = [row.logprobs_mode if row.params.logprobs is not None else None for row in rows]
        self._top = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs]
        self._masked = [i for i, p in enumerate(params) if p.return_sampling_mask]

    def draw(self, logits: torch.Tensor, raw: torch.Tensor | None = None) -> Drawn:
        """Draw one token for each row; the arguments are those of :meth:`choose`."""
        choice = self.choose(logits, raw)
        # A single copy from the device brings tokens and failures.
        token_ids = torch.where(drawable(choice.top), choice.token_ids, NOT_FINITE).tolist()
        if min(token_ids) < 0:
            failures = failures_of(choice.top).tolist()
            token_ids = [failure or token_id for failure, token_id in zip(failures, token_ids, strict=True)]
        return Drawn(token_ids, *self._describe(choice), self.masks(choice))

    def choose(self, logits: torch.Tensor, raw: torch.Tensor | None = None) -> Choice:
        """Draw one token for each row, and leave everything on the device.

        Args:
            logits: Shape (rows, vocabulary), any float type. Not changed.
            raw: The model's own logits, if ``logits`` were changed, such as by a grammar's mask.
        """
        logits = logits.float()
        adjusted = self._adjust(logits)
        scaled = adjusted if self._plain_temperature else adjusted / self._temperature[:, None]
        processed = self._truncate(scaled)
        token_ids = self._choose(adjusted, processed)
        self.steps += 1
        return Choice(token_ids, scaled.amax(-1), logits if raw is None else raw.float(), processed)

    def logprobs(self, choice: Choice) -> torch.Tensor:
        """Return logprobs of every token, each row in its own mode; raw for rows that want none.

        Returns:
            float32, shape (rows, vocabulary).
        """
        logprobs = choice.raw.log_softmax(-1)
        for mode in {mode for mode in self._modes if mode not in (None, LogprobsMode.RAW)}:
            rows = self._long([i for i, own in enumerate(self._modes) if own is mode])
            logprobs[rows] = self._logits_of(mode, choice)[rows].log_softmax(-1)
        certain = [i for i, mode in enumerate(self._modes) if mode is LogprobsMode.PROCESSED and self._is_greedy(i)]
        if certain:
            logprobs[self._long(certain)] = -torch.inf
            logprobs[self._long(certain), choice.token_ids[self._long(certain)]] = 0.0
        return logprobs

    def masks(self, choice: Choice) -> dict[int, bytes]:
        """Return the ids that each token was drawn from, by row, for the rows that want them.

        A greedy row's only id is its token. Masks of rows that failed are arbitrary.

        Returns:
            Bytes, of which :func:`drivetrain_sampling.packed_masks.joined` makes a sample's mask.
        """
        kept = self.kept(choice)
        return {} if kept is None else dict(zip(self.masked, pack(kept), strict=True))

    @property
    def masked(self) -> list[int]:
        """Rows that want the ids that their tokens were drawn from."""
        return self._masked

    def kept(self, choice: Choice) -> torch.Tensor | None:
        """Return the ids that each token was drawn from, as booleans on the device; None if no row wants them.

        Returns:
            Shape (len(masked), vocabulary).
        """
        if not self._masked:
            return None
        every = len(self._masked) == len(self._rows)
        rows = slice(None) if every else self._long(self._masked)
        kept = choice.processed[rows] > -torch.inf
        if self._any_greedy:
            greedy = self._greedy[rows, None]
            kept &= ~greedy
            kept |= greedy & (torch.arange(kept.shape[-1], device=self._device) == choice.token_ids[rows, None])
        return kept

    def _is_greedy(self, row: int) -> bool:
        return self._rows[row].params.temperature == 0

    def _choose(self, adjusted: torch.Tensor, processed: torch.Tensor) -> torch.Tensor:
        if self._all_greedy:
            return adjusted.argmax(-1)
        cumulative = weights(processed).cumsum_(-1)
        total = cumulative[:, -1:]
        target = (uniform(self._seeds, self.steps)[:, None] * total).long()
        # Rounding may give the total itself, which lies beyond the last token.
        target = torch.minimum(target, total - 1)
        # With NaN logits, the search may end beyond the vocabulary.
        drawn = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=cumulative.shape[-1] - 1)
        return torch.where(self._greedy, adjusted.argmax(-1), drawn) if self._any_greedy else drawn

    def _adjust(self, raw: torch.Tensor) -> torch.Tensor:
        if not (self._processed or self._biased or self._repetition or self._counted or self._held_back):
            return raw
        logits = raw.clone()
        for i in self._processed:
            row = self._rows[i]
            for processor in row.params.logit_processors:
                self._process(logits[i], processor, row.steps)
        for i in self._repetition:
            row = self._rows[i]
            seen = self._long(sorted({*row.prompt_token_ids, *row.generated}))
            penalty, values = row.params.repetition_penalty, logits[i, seen]
            logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
        for i in self._counted:
            counts = Counter(self._rows[i].drawn())
            if counts:
                params = self._rows[i].params
                lowered = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
                logits[i, self._long(list(counts))] -= self._float(lowered)
        for i in self._biased:
            bias = self._rows[i].params.logit_bias
            logits[i, self._long(list(bias))] += self._float(list(bias.values()))
        for i in self._held_back:
            row = self._rows[i]
            if row.steps < row.params.min_new_tokens and row.stop_token_ids:
                logits[i, self._long(list(row.stop_token_ids))] = -torch.inf
        return logits

    def _process(self, logits: torch.Tensor, processor: LogitProcessor, step: int) -> None:
        """Change one row's logits in place."""
        match processor:
            case ActionMask(allowed_token_ids=ids):
                allowed = torch.zeros_like(logits, dtype=torch.bool)
                allowed[self._long(list(ids))] = True
                logits.masked_fill_(~allowed, -torch.inf)
            case DisallowedTokens(token_ids=ids):
                logits[self._long(list(ids))] = -torch.inf
            case TemperatureSchedule():
                logits /= _scheduled_temperature(processor, step)

    def _truncate(self, scaled: torch.Tensor) -> torch.Tensor:
        if self._top_k is None and self._top_p is None and self._min_p is None:
            return scaled
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self._top_k is not None:
            vocabulary = scaled.shape[-1]
            limit = self._long([k or vocabulary for k in self._top_k])
            ordered = ordered.masked_fill(torch.arange(vocabulary, device=self._device) >= limit[:, None], -torch.inf)
        if self._top_p is not None:
            own = weights(ordered)
            before = own.cumsum(-1)
            kept = self._top_p[:, None] * before[:, -1:].double()
            ordered = ordered.masked_fill(before.sub_(own) >= kept, -torch.inf)
        if self._min_p is not None:
            share = (ordered - ordered[:, :1]).exp_()
            ordered = ordered.masked_fill(share < self._min_p[:, None], -torch.inf)
        return torch.empty_like(scaled).scatter_(-1, order, ordered)

    def _describe(self, choice: Choice) -> tuple[list[float] | None, dict[int, TopLogprobs]]:
        wanted = {mode for mode in self._modes if mode is not None}
        if not wanted:
            return None, {}
        by_mode: dict[LogprobsMode, list[float]] = {}
        top: dict[int, TopLogprobs] = {}
        for mode in wanted:
            logits = self._logits_of(mode, choice)
            normaliser = logits.logsumexp(-1)
            values = logits.gather(-1, choice.token_ids[:, None])[:, 0] - normaliser
            if mode is LogprobsMode.PROCESSED and self._any_greedy:
                values = values.masked_fill(self._greedy, 0.0)
            by_mode[mode] = values.tolist()
            for i, count in self._top:
                if self._modes[i] is mode and count:
                    if mode is LogprobsMode.PROCESSED and self._is_greedy(i):
                        top[i] = [(int(choice.token_ids[i]), 0.0)]
                    else:
                        top[i] = top_logprobs(logits[i] - normaliser[i], count)
        if len(wanted) == 1:
            return next(iter(by_mode.values())), top
        return [by_mode[mode][i] if mode is not None else 0.0 for i, mode in enumerate(self._modes)], top

    def _logits_of(self, mode: LogprobsMode, choice: Choice) -> torch.Tensor:
        match mode:
            case LogprobsMode.RAW:
                return choice.raw
            case LogprobsMode.TEMPERATURE:
                return choice.raw if self._plain_temperature else choice.raw / self._temperature[:, None]
            case LogprobsMode.PROCESSED:
                return choice.processed

    def _long(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _float(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _mask(self, values: list[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.bool, device=self._device)


def drawable(top: torch.Tensor) -> torch.Tensor:
    """Return which rows a token can be drawn from, on the device; ``top`` is as for :func:`failures_of`."""
    return top.abs() < torch.inf


def failures_of(top: torch.Tensor) -> torch.Tensor:
    """Return failure codes of the rows, on the device.

    Args:
        top: The largest logit of each row after masks, shape (rows,). It is NaN if any of the row's logits is.

    Returns:
        int8, shape (rows,): 0, or :data:`NOT_FINITE` or :data:`NO_TOKEN` for a row that failed.
    """
    return torch.where(top == -torch.inf, NO_TOKEN, torch.where(drawable(top), 0, NOT_FINITE)).to(torch.int8)


def weights(logits: torch.Tensor) -> torch.Tensor:
    """Return probabilities as integers in proportion to the weight of a row's likeliest token; int64."""
    return (logits - logits.amax(-1, keepdim=True)).exp_().mul_(_LIKELIEST).long()


def _scheduled_temperature(schedule: TemperatureSchedule, step: int) -> float:
    last = schedule.steps - 1
    share = min(step, last) / last if last else 1.0
    return schedule.start + (schedule.end - schedule.start) * share


def top_logprobs(logprobs: torch.Tensor, count: int) -> TopLogprobs:
    """Return the ``count`` most likely tokens of one position, most likely first, without those of probability zero.

    Args:
        logprobs: Shape (vocabulary,).
        count: Number of tokens.
    """
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [(token_id, value) for token_id, value in pairs if value != -torch.inf]
