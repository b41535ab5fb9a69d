"""Scores of given sequences, from logits at their positions.

An engine passes a request's ``Scoring`` unread, as text, to the process that has the logits. There a
:class:`ScoredPrompt` takes them, part by part in any order, and its scores go back as bytes.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch

from drivetrain.types.token_scores import Scoring, TokenScores

LOGITS_AT_ONCE: Final = 1 << 25
"""Most logits that are copied to float32 at once, unless one position alone has more."""

_scorings: Final = msgspec.msgpack.Decoder(Scoring)
_scores: Final = msgspec.msgpack.Decoder(TokenScores)


def encode_scoring(scoring: Scoring) -> str:
    """Encode what to score, for :class:`ScoredPrompt`."""
    return base64.b64encode(msgspec.msgpack.encode(scoring)).decode()


def decode_scores(packed: bytes) -> TokenScores:
    """Decode what :meth:`ScoredPrompt.packed` returned."""
    return _scores.decode(packed)


@dataclass(frozen=True, slots=True)
class Part:
    """Scores of some consecutive positions."""

    start: int
    """Index of the first of these positions among all scored positions of the sequence."""
    given: torch.Tensor
    """Logprobs of each position's own token and of its given ids, float32 of shape (positions, 1 + width)."""
    top: torch.Tensor
    """Logprobs of the most likely tokens, float32 of shape (positions, top_k)."""
    top_ids: torch.Tensor
    """Their ids, int32 of the same shape."""

    def on_host(self) -> Part:
        """Copy the tensors to the host, and wait for that."""
        return Part(self.start, self.given.cpu(), self.top.cpu(), self.top_ids.cpu())


def score_rows(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score consecutive positions.

    Args:
        logits: Shape (positions, vocabulary), of any floating dtype; not changed.
        ids: Ids to score at each position, int64 of shape (positions, ids), on the same device.
        temperature: Divides the logits.
        top_k: Number of most likely tokens.

    Returns:
        Logprobs of the ids, float32 of their shape; logprobs and ids of the most likely tokens, float32 and int32 of
        shape (positions, top_k).
    """
    count = len(logits)
    given = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    top = torch.empty(count, top_k, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(count, top_k, dtype=torch.int32, device=logits.device)
    step = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    for start in range(0, count, step):
        part = slice(start, start + step)
        logprobs = _scaled(logits[part].float(), temperature).log_softmax(-1)
        given[part] = logprobs.gather(-1, ids[part])
        if top_k:
            top[part], top_ids[part] = logprobs.topk(top_k)
    return given, top, top_ids


def ids_to_score(scoring: Scoring, prompt: list[int]) -> torch.Tensor:
    """Return each scored position's own token and given ids, int64 of shape (positions, 1 + width) on the host."""
    count = scoring.scored(len(prompt))
    own = torch.tensor(prompt[len(prompt) - count :], dtype=torch.long)[:, None]
    if not scoring.width:
        return own
    return torch.cat([own, torch.from_numpy(scoring.ids()[scoring.positions - count :].astype(np.int64))], dim=1)


def packed_scores(scoring: Scoring, given: torch.Tensor, top: torch.Tensor, top_ids: torch.Tensor) -> TokenScores:
    """Pack the scores of all positions that are scored; the tensors are those of :class:`Part`, on the host."""
    return TokenScores.pack(
        scoring,
        given[:, 0].numpy(),
        given[:, 1:].numpy() if scoring.width else None,
        (top.numpy(), top_ids.numpy()) if scoring.top_k else None,
    )


class ScoredPrompt:
    """The scores of one prompt, put together from parts.

    Args:
        scoring: The positions, ids and temperature, encoded or not.
        prompt: The prompt's token ids.
        device: Device on which the parts are joined.
    """

    def __init__(self, scoring: Scoring | str, prompt: list[int], device: torch.device | str = "cpu") -> None:
        if isinstance(scoring, str):
            scoring = _scorings.decode(base64.b64decode(scoring))
        self.scoring = scoring
        self._ids = ids_to_score(scoring, prompt).to(device)
        self.length, count = len(prompt), len(self._ids)
        self.first = len(prompt) - count - 1
        """The first token whose logits are scored: they are those of the token after it."""
        self.given = torch.full(self._ids.shape, torch.nan, device=device)
        """Shape (positions, 1 + width)."""
        self.top = torch.full((count, scoring.top_k), torch.nan, device=device)
        """Shape (positions, top_k)."""
        self.top_ids = torch.zeros(count, scoring.top_k, dtype=torch.int32, device=device)
        """Shape (positions, top_k)."""
        self._is_there = torch.zeros(count, dtype=torch.bool)

    @property
    def is_complete(self) -> bool:
        """True if every position was scored."""
        return bool(self._is_there.all())

    def wanted(self, token: int, count: int) -> range:
        """Return the places in the prompt, of ``count`` tokens from ``token`` on, whose logits are scored."""
        return range(max(token, self.first), min(token + count, self.first + len(self._ids)))

    def part(self, token: int, logits: torch.Tensor) -> Part | None:
        """Score consecutive tokens' logits, on their device; return None if none of them is asked for.

        Args:
            token: Place of the first of these tokens in the prompt.
            logits: Shape (tokens, vocabulary); not changed.
        """
        wanted = self.wanted(token, len(logits))
        if not wanted:
            return None
        start = wanted.start - self.first
        ids = self._ids[start : start + len(wanted)].to(logits.device)
        rows = logits[wanted.start - token : wanted.stop - token]
        return Part(start, *score_rows(rows, ids, self.scoring.temperature, self.scoring.top_k))

    def add(self, part: Part) -> None:
        """Take a part over."""
        rows = slice(part.start, part.start + len(part.given))
        self.given[rows], self.top[rows], self.top_ids[rows] = part.given, part.top, part.top_ids
        self._is_there[rows] = True

    def scores(self) -> TokenScores:
        """Return the scores; positions of no part are NaN."""
        return packed_scores(self.scoring, self.given, self.top, self.top_ids)

    def packed(self) -> bytes:
        """Return the scores for :func:`decode_scores`."""
        return msgspec.msgpack.encode(self.scores())


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide by the temperature, after a shift that keeps differences of large quotients exact."""
    if temperature == 1.0:
        return logits
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)
