"""The token ids that were left to draw from at each position of a sample, packed."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORD: Final = struct.Struct("<i")


class MaskForm(Enum):
    """The packing of one position's ids. The shortest form is used; if two are equally short, the first."""

    KEPT = "kept"
    """The ids that were left, ascending."""
    EXCLUDED = "excluded"
    """The ids that could not be drawn, ascending. Nothing at all if every id was left."""
    BITS = "bits"
    """One bit per id of the vocabulary, 32 in a word; bit ``i`` of word ``w`` is set if id ``32 * w + i`` was left."""


def form_of(count: int, vocab_size: int) -> tuple[MaskForm, int]:
    """Return the form of a position at which ``count`` ids were left, and its length in words of 32 bits.

    Raises:
        ValueError: The vocabulary has fewer ids.
    """
    excluded, bits = vocab_size - count, -(-vocab_size // 32)
    if not 0 <= count <= vocab_size:
        raise ValueError(f"{count} ids are left of a vocabulary of {vocab_size}; expected from 0 to {vocab_size}")
    if count <= min(excluded, bits):
        return MaskForm.KEPT, count
    return (MaskForm.EXCLUDED, excluded) if excluded <= bits else (MaskForm.BITS, bits)


class _Starts:
    """Base with a slot for the words at which positions start, found when a position is first looked up."""

    __slots__ = ("_starts",)

    _starts: list[int]


@dataclass(frozen=True, slots=True, repr=False)
class SamplingMask(_Starts):
    """The token ids that were left to draw from, at each position of a sample.

    An id was left if its processed logit was above minus infinity: after logit processors, grammar, ``min_new_tokens``,
    top-k, top-p and min-p. A greedy position (``temperature=0``) has the drawn id alone.

    Masks are equal if they hold the same ids. Positions are sliced like a list (``mask[:8]``) and joined by ``+``.
    """

    vocab_size: int
    """Number of ids that the model has logits for."""
    packed: bytes = b""
    """The positions one after another, as little-endian words of 32 bits: the number of ids left, then the ids in the
    shortest :class:`MaskForm`."""

    @classmethod
    def of(cls, vocab_size: int, positions: Iterable[Iterable[int]]) -> SamplingMask:
        """Pack the ids left at each position.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        return cls(vocab_size, b"".join(_packed(vocab_size, ids) for ids in positions))

    @classmethod
    def join(cls, vocab_size: int, parts: Iterable[SamplingMask]) -> SamplingMask:
        """Put the positions of several masks one after another.

        Raises:
            ValueError: A part is of another vocabulary.
        """
        parts = list(parts)
        other = next((part.vocab_size for part in parts if part.vocab_size != vocab_size), None)
        if other is not None:
            raise ValueError(f"a mask over {other} ids cannot join one over {vocab_size}; use masks of one model")
        return cls(vocab_size, b"".join(part.packed for part in parts))

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self._index()) - 1

    def __getitem__(self, positions: slice) -> SamplingMask:
        """Return some consecutive positions."""
        if not isinstance(positions, slice):
            raise TypeError(f"positions={positions!r}: take a slice such as mask[:8], or call ids(position)")
        start, stop, step = positions.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of step {step}: expected consecutive positions, so step 1")
        starts = self._index()
        return SamplingMask(self.vocab_size, self.packed[4 * starts[start] : 4 * starts[max(start, stop)]])

    def __add__(self, other: SamplingMask) -> SamplingMask:
        """Return these positions followed by the other's."""
        return SamplingMask.join(self.vocab_size, (self, other))

    def __repr__(self) -> str:
        """Return the sizes; the ids themselves would fill pages."""
        return f"SamplingMask(vocab_size={self.vocab_size}, positions={len(self)}, nbytes={len(self.packed)})"

    def count(self, position: int) -> int:
        """Return the number of ids left at a position."""
        count: int = _WORD.unpack_from(self.packed, 4 * self._start(position))[0]
        return count

    def ids(self, position: int) -> list[int]:
        """Return the ids left at a position, ascending."""
        if form_of(self.count(position), self.vocab_size)[0] is MaskForm.KEPT:
            return [int(one) for one in self._words(position)]
        import numpy as np

        found: list[int] = np.flatnonzero(self._row(position)).tolist()
        return found

    def is_unrestricted(self, position: int) -> bool:
        """Return whether every id of the vocabulary was left at a position."""
        return self.count(position) == self.vocab_size

    def to_numpy(self) -> NDArray[np.bool_]:
        """Return an array of shape (positions, vocabulary) that is true for the ids that were left.

        It takes one byte per element; for a long sample and a large vocabulary convert slices of the mask.
        """
        import numpy as np

        if not len(self):
            return np.zeros((0, self.vocab_size), dtype=np.bool_)
        return np.stack([self._row(position) for position in range(len(self))])

    def _row(self, position: int) -> NDArray[np.bool_]:
        import numpy as np

        form, _ = form_of(self.count(position), self.vocab_size)
        words = self._words(position)
        if form is MaskForm.BITS:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            return bits[: self.vocab_size].astype(np.bool_)
        row = np.full(self.vocab_size, form is MaskForm.EXCLUDED, dtype=np.bool_)
        row[words] = form is MaskForm.KEPT
        return row

    def _words(self, position: int) -> NDArray[np.int32]:
        import numpy as np

        at = self._start(position)
        end = self._index()[range(len(self))[position] + 1]
        return np.frombuffer(self.packed, dtype="<i4", count=end - at - 1, offset=4 * (at + 1))

    def _start(self, position: int) -> int:
        return self._index()[range(len(self))[position]]

    def _index(self) -> list[int]:
        """Return the word at which each position starts, and the end of the last.

        Raises:
            ValueError: ``packed`` is not made of whole positions.
        """
        try:
            return self._starts
        except AttributeError:
            object.__setattr__(self, "_starts", _starts_in(self.packed, self.vocab_size))
        return self._starts


def _packed(vocab_size: int, ids: Iterable[int]) -> bytes:
    """Pack one position."""
    left = set(ids)
    if left and not 0 <= min(left) <= max(left) < vocab_size:
        wrong = next(one for one in left if not 0 <= one < vocab_size)
        raise ValueError(f"the id {wrong} is outside the vocabulary; expected from 0 to {vocab_size - 1}")
    form, words = form_of(len(left), vocab_size)
    match form:
        case MaskForm.KEPT:
            listed = sorted(left)
        case MaskForm.EXCLUDED:
            listed = [one for one in range(vocab_size) if one not in left]
        case MaskForm.BITS:
            return _WORD.pack(len(left)) + sum(1 << one for one in left).to_bytes(4 * words, "little")
    return struct.pack(f"<{1 + len(listed)}i", len(left), *listed)


def _starts_in(packed: bytes, vocab_size: int) -> list[int]:
    starts, at, words, bits = [0], 0, len(packed) // 4, -(-vocab_size // 32)
    while at < words:
        (count,) = _WORD.unpack_from(packed, 4 * at)
        length = min(count, vocab_size - count, bits)  # as form_of says
        if length < 0:
            raise ValueError(f"{count} ids are left of a vocabulary of {vocab_size}; these are no packed positions")
        at += 1 + length
        starts.append(at)
    if 4 * at != len(packed):
        raise ValueError(f"{len(packed)} packed bytes do not end with a position: the last would end at byte {4 * at}")
    return starts
