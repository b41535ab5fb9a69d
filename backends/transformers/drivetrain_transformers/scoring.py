"""Scores of given sequences: logprobs at their positions, without the logits of all positions in memory at once."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import torch

from drivetrain.types.token_scores import Scoring
from drivetrain_sampling.scores import LOGITS_AT_ONCE, ids_to_score, packed_scores, score_rows
from drivetrain_transformers.model import Computed, LoadedModel
from drivetrain_transformers.sequences import Sequence


@dataclass(frozen=True, slots=True)
class _Scored:
    """A sequence that asks for scores."""

    sequence: Sequence
    scoring: Scoring
    source: torch.Tensor
    """Shape (positions, hidden size) or (positions, vocabulary): states or logits of the positions to score."""


def positions_of(sequence: Sequence) -> int:
    """Return how many positions of a sequence must be computed for its scores, its last token included; 0: none.

    A sequence that lost its cache after it was scored is not scored again.
    """
    scoring = sequence.request.scoring
    if scoring is None or sequence.scores is not None:
        return 0
    return scoring.scored(len(sequence.request.prompt_token_ids)) + 1


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
        scoring, count = sequence.request.scoring, positions_of(sequence) - 1
        if scoring is not None and count >= 0:
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
    scoring, lora = scored[0].scoring, scored[0].sequence.request.lora
    source = torch.cat([one.source for one in scored])
    ids = torch.cat([ids_to_score(one.scoring, one.sequence.request.prompt_token_ids) for one in scored])
    ids = ids.to(source.device)
    parts = []
    step = max(1, LOGITS_AT_ONCE // model.info.vocab_size)
    for rows, wanted in zip(torch.split(source, step), torch.split(ids, step), strict=True):
        logits = model.head(rows, lora) if apart and len(rows) else rows
        parts.append(score_rows(logits, wanted, scoring.temperature, scoring.top_k))
    given, top, top_ids = (torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True))
    end = 0
    for one in scored:
        start, end = end, end + len(one.source)
        one.sequence.scores = packed_scores(one.scoring, given[start:end], top[start:end], top_ids[start:end])
