"""Scores of given sequences: logprobs at their positions, without the logits of all positions in memory at once."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Final

import torch

from drivetrain.types.token_scores import Scoring, TokenScores
from drivetrain_transformers.model import Computed, LoadedModel
from drivetrain_transformers.sequences import Sequence

_LOGITS_AT_ONCE: Final = 1 << 25
"""Most logits that are in memory in float32 at once, unless one position alone has more."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A sequence that asks for scores."""

    sequence: Sequence
    scoring: Scoring
    source: torch.Tensor
    """Shape (positions, hidden size) or (positions, vocabulary): states or logits of the positions to score."""


def positions_of(sequence: Sequence) -> int:
    """Return how many positions of a sequence must be computed for its scores, its last token included; 0: none."""
    scoring = sequence.request.scoring
    return 0 if scoring is None else scoring.scored(len(sequence.request.prompt_token_ids)) + 1


def score(model: LoadedModel, group: Values[Sequence], rows: Values[int], computed: Computed) -> None:
    """Set the scores of those sequences that ask for them.

    Args:
        model: The model.
        group: Sequences of one forward pass.
        rows: Row of each sequence.
        computed: Results of the pass, with ``before_head``, or with logits at all positions.
    """
    source = computed.logits if computed.before_head is None else computed.before_head
    alike: dict[tuple[object, ...], list[_Scored]] = {}
    for sequence, row in zip(group, rows, strict=True):
        scoring = sequence.request.scoring
        if scoring is not None:
            count = positions_of(sequence) - 1
            end = source.shape[1] - 1
            key = sequence.request.lora, scoring.temperature, scoring.width, scoring.top_k
            alike.setdefault(key, []).append(_Scored(sequence, scoring, source[row, end - count : end]))
    for scored in alike.values():
        _score_alike(model, scored, apart=computed.before_head is not None)


def _score_alike(model: LoadedModel, scored: list[_Scored], *, apart: bool) -> None:
    """Set the scores of sequences that ask for the same, of one adapter.

    Args:
        model: The model.
        scored: The sequences.
        apart: True if their sources are states before the model's head, False if they are logits.
    """
    first, lora = scored[0].scoring, scored[0].sequence.request.lora
    source = torch.cat([one.source for one in scored])
    ids = torch.cat([_ids_to_score(one) for one in scored]).to(source.device)
    count, top_k = len(source), first.top_k
    given = torch.empty(ids.shape, dtype=torch.float32, device=source.device)
    top = torch.empty(count, top_k, dtype=torch.float32, device=source.device)
    top_ids = torch.empty(count, top_k, dtype=torch.int32, device=source.device)
    step = max(1, _LOGITS_AT_ONCE // model.info.vocab_size)
    for start in range(0, count, step):
        part = slice(start, start + step)
        logits = model.head(source[part], lora) if apart else source[part]
        logprobs = _scaled(logits.float(), first.temperature).log_softmax(-1)
        given[part] = logprobs.gather(-1, ids[part])
        if top_k:
            top[part], top_ids[part] = logprobs.topk(top_k)
    given, top, top_ids = given.cpu(), top.cpu(), top_ids.cpu()
    end = 0
    for one in scored:
        start, end = end, end + len(one.source)
        one.sequence.scores = TokenScores.pack(
            one.scoring,
            given[start:end, 0].numpy(),
            given[start:end, 1:].numpy() if first.width else None,
            (top[start:end].numpy(), top_ids[start:end].numpy()) if top_k else None,
        )


def _ids_to_score(scored: _Scored) -> torch.Tensor:
    """Return the own token of each position and its given ids, of shape (positions, 1 + width)."""
    count = len(scored.source)
    prompt = scored.sequence.request.prompt_token_ids
    own = torch.tensor(prompt[len(prompt) - count :], dtype=torch.long)[:, None]
    if not scored.scoring.width:
        return own
    given = torch.from_numpy(scored.scoring.ids().astype("int64"))
    return torch.cat([own, given[len(given) - count :]], dim=1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide by the temperature, after a shift that keeps differences of large quotients exact."""
    if temperature == 1.0:
        return logits
    return (logits - logits.amax(-1, keepdim=True)) / temperature


__all__ = ["positions_of", "score"]
