"""Logprobs at the positions of a given sequence: the request, and the packed result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, repr=False)
class Scoring:
    """Logprobs wanted at the last positions of a request's prompt.

    A position belongs to a token of the prompt, and to the distribution over the tokens that could stand in its place,
    given the tokens before it. The first token of a prompt has no such distribution.
    """

    positions: int
    """Number of the prompt's last tokens, from 1 to all of them."""
    temperature: float = 1.0
    """Divides the logits; above 0."""
    top_k: int = 0
    """Number of most likely tokens per position."""
    width: int = 0
    """Number of given ids per position; 0: none are given."""
    packed_ids: bytes = b""
    """The given ids: little-endian int32 of shape (positions, width)."""

    def __repr__(self) -> str:
        """Return the sizes; the ids themselves would fill pages."""
        return (
            f"Scoring(positions={self.positions}, temperature={self.temperature:g}, top_k={self.top_k}, "
            f"width={self.width})"
        )

    def ids(self) -> NDArray[np.int32]:
        """Return the given ids, of shape (positions, width)."""
        return _integers(self.packed_ids, self.positions, self.width)

    def scored(self, prompt_tokens: int) -> int:
        """Return how many of the positions have a distribution, in a prompt of this many tokens."""
        return min(self.positions, prompt_tokens - 1)


@dataclass(frozen=True, slots=True, repr=False)
class TokenScores:
    """Logprobs at the last positions of a given sequence, as packed arrays.

    Row ``i`` of each array belongs to the ``i``-th of the sequence's last ``positions`` tokens, given all tokens before
    it. The first token of a sequence has nothing before it: its row holds NaN, and -1 as ids.

    The arrays are read-only views of the packed bytes; copy one to change it.
    """

    positions: int
    """Number of the sequence's last tokens that were scored."""
    temperature: float
    """Temperature by which the logits were divided; 1 for the model's own distribution."""
    packed_tokens: bytes
    """Logprob of each token of the sequence: little-endian float32 of shape (positions,)."""
    width: int = 0
    """Number of ids per position that ``at`` gave."""
    packed_at: bytes = b""
    """Logprobs of those ids: little-endian float32 of shape (positions, width)."""
    top_k: int = 0
    """Number of most likely tokens per position."""
    packed_top: bytes = b""
    """Logprobs of the most likely tokens: little-endian float32 of shape (positions, top_k)."""
    packed_top_ids: bytes = b""
    """Their ids: little-endian int32 of shape (positions, top_k)."""

    @classmethod
    def pack(
        cls,
        scoring: Scoring,
        tokens: NDArray[np.float32],
        at: NDArray[np.float32] | None = None,
        top: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None,
    ) -> TokenScores:
        """Pack the rows that have a distribution.

        Args:
            scoring: The request's.
            tokens: Logprob of each token, float32 of shape (rows,); ``scoring.scored`` says how many rows there are.
            at: Logprobs of the given ids, float32 of shape (rows, width); None without given ids.
            top: Logprobs and ids of the likeliest tokens, float32 and int32 of shape (rows, top_k), likeliest first.
        """
        missing = scoring.positions - len(tokens)
        nan, none = b"\x00\x00\xc0\x7f", b"\xff\xff\xff\xff"
        values, ids = (None, None) if top is None else top
        return cls(
            scoring.positions,
            scoring.temperature,
            nan * missing + tokens.astype("<f4", copy=False).tobytes(),
            scoring.width,
            b"" if at is None else nan * (missing * scoring.width) + at.astype("<f4", copy=False).tobytes(),
            scoring.top_k,
            b"" if values is None else nan * (missing * scoring.top_k) + values.astype("<f4", copy=False).tobytes(),
            b"" if ids is None else none * (missing * scoring.top_k) + ids.astype("<i4", copy=False).tobytes(),
        )

    @classmethod
    def of_one_token(cls, scoring: Scoring) -> TokenScores:
        """Return the scores of a sequence of one token, none of whose positions has a distribution."""
        import numpy as np

        none = np.zeros(0, dtype=np.float32)
        return cls.pack(scoring, none, none, (none, none.astype(np.int32)))

    def __repr__(self) -> str:
        """Return the sizes; the numbers themselves would fill pages."""
        return (
            f"TokenScores(positions={self.positions}, temperature={self.temperature:g}, width={self.width}, "
            f"top_k={self.top_k})"
        )

    @property
    def token_logprobs(self) -> NDArray[np.float32]:
        """Logprob of each of the sequence's own tokens; float32 of shape (positions,)."""
        return _floats(self.packed_tokens, self.positions)

    @property
    def at_logprobs(self) -> NDArray[np.float32]:
        """Logprobs of the ids given as ``at``, in their order; float32 of shape (positions, width)."""
        return _floats(self.packed_at, self.positions, self.width)

    @property
    def top_logprobs(self) -> NDArray[np.float32]:
        """Logprobs of the most likely tokens, most likely first; float32 of shape (positions, top_k)."""
        return _floats(self.packed_top, self.positions, self.top_k)

    @property
    def top_ids(self) -> NDArray[np.int32]:
        """Ids of the most likely tokens, most likely first; int32 of shape (positions, top_k)."""
        return _integers(self.packed_top_ids, self.positions, self.top_k)

    def fault(self, scoring: Scoring, prompt_tokens: int) -> str:
        """Return why these are not the scores that were asked for; "" if they may be.

        Args:
            scoring: The request's.
            prompt_tokens: Number of the prompt's tokens.
        """
        asked = scoring.positions, scoring.width, scoring.top_k, scoring.temperature
        if asked != (self.positions, self.width, self.top_k, self.temperature):
            return f"{scoring!r} was asked for, and {self!r} came"
        sizes = (1, self.packed_tokens), (self.width, self.packed_at)
        tops = (self.top_k, self.packed_top), (self.top_k, self.packed_top_ids)
        for width, packed in (*sizes, *tops):
            if len(packed) != 4 * self.positions * width:
                return f"{len(packed)} bytes came for {self.positions} positions of {width} numbers"
        missing = self.positions - scoring.scored(prompt_tokens)
        if missing and not all(map(math.isnan, self.token_logprobs[:missing].tolist())):
            return "the first token, which nothing precedes, came with a logprob"
        return ""

    def has_nan(self, prompt_tokens: int) -> bool:
        """Return whether a logprob of a position that has a distribution is NaN."""
        import numpy as np

        first = max(self.positions - prompt_tokens + 1, 0)
        return any(
            bool(np.isnan(part[first:]).any()) for part in (self.token_logprobs, self.at_logprobs, self.top_logprobs)
        )


def _floats(packed: bytes, *shape: int) -> NDArray[np.float32]:
    import numpy as np

    return np.frombuffer(packed, dtype="<f4").reshape(shape)


def _integers(packed: bytes, *shape: int) -> NDArray[np.int32]:
    import numpy as np

    return np.frombuffer(packed, dtype="<i4").reshape(shape)
