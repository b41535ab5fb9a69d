"""Scores put together from parts equal one log-softmax over the whole, in whatever order the parts come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import drivetrain_sampling.scores
from drivetrain.types.token_scores import Scoring, TokenScores
from drivetrain_sampling.scores import ScoredPrompt, decode_scores, encode_scoring, score_rows

VOCABULARY = 50
PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, size=20).tolist()
LOGITS = torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 4
IDS = np.random.default_rng(3).integers(0, VOCABULARY, size=(7, 3))


def scoring(positions: int = 7, temperature: float = 0.6) -> Scoring:
    ids = np.resize(IDS, (positions, 3)).astype("<i4")
    return Scoring(positions, temperature, top_k=2, width=3, packed_ids=ids.tobytes())


def assert_right(scores: TokenScores, asked: Scoring) -> None:
    count = min(asked.positions, len(PROMPT) - 1)
    rows = (LOGITS[-1 - count : -1].double() / asked.temperature).log_softmax(-1)
    own, ids = torch.tensor(PROMPT[-count:])[:, None], torch.tensor(asked.ids()[-count:].astype(np.int64))
    for found, expected in (
        (scores.token_logprobs[-count:, None], rows.gather(-1, own)),
        (scores.at_logprobs[-count:], rows.gather(-1, ids)),
        (scores.top_logprobs[-count:], rows.topk(2).values),
    ):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)
    assert scores.top_ids[-count:].tolist() == rows.topk(2).indices.tolist()


@pytest.mark.parametrize(
    "parts", [[(0, 20)], [(0, 11), (11, 13), (13, 20)], [(13, 20), (0, 13)], [(0, 15), (0, 12), (10, 20)], [(12, 19)]]
)
def test_parts_are_put_together(parts: list[tuple[int, int]]) -> None:
    prompt = ScoredPrompt(encode_scoring(scoring()), PROMPT)
    for start, end in parts:
        assert not prompt.is_complete or end == 20
        part = prompt.part(start, LOGITS[start:end])
        if part is not None:
            prompt.add(part)
    assert prompt.is_complete
    assert_right(decode_scores(prompt.packed()), scoring())


def test_only_wanted_positions_are_scored() -> None:
    prompt = ScoredPrompt(scoring(), PROMPT)
    assert (prompt.wanted(0, 12), prompt.wanted(0, 20), prompt.wanted(19, 1)) == (
        range(12, 12),
        range(12, 19),
        range(19, 19),
    )
    assert prompt.part(0, LOGITS[:12]) is None
    assert prompt.part(19, LOGITS[19:]) is None
    part = prompt.part(10, LOGITS[10:15])
    assert part is not None
    assert (part.start, len(part.given)) == (0, 3)


def test_positions_of_no_part_are_nan() -> None:
    prompt = ScoredPrompt(scoring(), PROMPT)
    part = prompt.part(0, LOGITS[:15])
    assert part is not None
    prompt.add(part)
    assert not prompt.is_complete
    assert np.isnan(prompt.scores().token_logprobs).tolist() == [False] * 3 + [True] * 4


def test_all_tokens_can_be_scored_but_the_first() -> None:
    prompt = ScoredPrompt(scoring(positions=20), PROMPT)
    part = prompt.part(0, LOGITS)
    assert part is not None
    prompt.add(part)
    assert np.isnan(prompt.scores().at_logprobs).any(axis=1).tolist() == [True] + [False] * 19
    assert_right(prompt.scores(), scoring(positions=20))


def test_rows_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, VOCABULARY, (20, 4))
    whole = score_rows(LOGITS, ids, 1.0, 3)
    monkeypatch.setattr(drivetrain_sampling.scores, "LOGITS_AT_ONCE", 3 * VOCABULARY)
    for one, other in zip(whole, score_rows(LOGITS, ids, 1.0, 3), strict=True):
        torch.testing.assert_close(one, other)


def test_logits_are_not_changed_and_may_be_of_half_precision() -> None:
    logits = LOGITS.bfloat16()
    kept, ids = logits.clone(), torch.randint(0, VOCABULARY, (20, 4))
    found = score_rows(logits, ids, 0.5, 1)[0]
    assert torch.equal(logits, kept)
    torch.testing.assert_close(found, (kept.float() / 0.5).log_softmax(-1).gather(-1, ids), rtol=1e-5, atol=1e-5)


def test_a_tiny_temperature_keeps_equal_logits_equal() -> None:
    logits = torch.tensor([[3.1, 3.1, -2.0]])
    given, _, _ = score_rows(logits, torch.tensor([[0, 1, 2]]), 1e-6, 0)
    assert given[0, :2].tolist() == pytest.approx([-np.log(2)] * 2)
    assert given[0, 2] < -1e6
