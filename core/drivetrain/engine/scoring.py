"""Checks what ``compute_logprobs`` is asked for, and packs it for the backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.checks.limits import MOST_SCORES
from drivetrain.checks.safe_repr import shown
from drivetrain.checks.simple_values import refuse
from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import MAX_MAGNITUDE, MIN_TEMPERATURE
from drivetrain.types.token_scores import Scoring

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class ScoringCall:
    """The arguments of one call, as the caller gave them."""

    at: Iterable[ArrayLike] | None = None
    temperature: float | None = None
    last_n: int | Sequence[int] | None = None
    top_k: int = 0

    @property
    def is_empty(self) -> bool:
        """True if neither ids nor a temperature nor a number of positions are given."""
        return self.at is None and self.temperature is None and self.last_n is None

    def scorings(self, lengths: Sequence[int], vocabulary: int) -> list[Scoring]:
        """Return what to score of each sequence.

        Args:
            lengths: Number of tokens of each sequence.
            vocabulary: Number of ids that the model has logits for.

        Raises:
            InvalidRequest: naming the argument, its value and what was expected.
        """
        temperature = 1.0 if self.temperature is None else _temperature(self.temperature)
        if self.top_k > vocabulary:
            refuse("top_k", self.top_k, f"expected at most the vocabulary's {vocabulary} ids")
        positions = _positions(self.last_n, lengths)
        ids = _given_ids(self.at, positions, vocabulary)
        scorings = []
        for index, (count, own) in enumerate(zip(positions, ids, strict=True)):
            if count * self.top_k > MOST_SCORES:
                refuse("top_k", self.top_k, f"expected at most {MOST_SCORES} logprobs of sequence {index}; score fewer")
            width = 0 if own is None else own.shape[1]
            packed = b"" if own is None else own.astype("<i4", copy=False).tobytes()
            scorings.append(Scoring(count, temperature, self.top_k, width, packed))
        return scorings


def _temperature(value: object) -> float:
    is_bool = isinstance(value, bool)
    if is_bool or not isinstance(value, int | float) or not MIN_TEMPERATURE <= value <= MAX_MAGNITUDE:
        refuse(
            "temperature",
            value,
            f"expected a number from {MIN_TEMPERATURE:g} to {MAX_MAGNITUDE:g}; 1 is the model's own",
        )
    return float(value)


def _positions(last_n: object, lengths: Sequence[int]) -> list[int]:
    """Return the number of positions of each sequence."""
    if last_n is None:
        return list(lengths)
    if isinstance(last_n, int):
        each: Sequence[object] = [last_n] * len(lengths)
    elif isinstance(last_n, Sequence) and not isinstance(last_n, str | bytes):
        each = last_n
    else:
        refuse("last_n", last_n, "expected an integer, or one for each sequence")
    if len(each) != len(lengths):
        refuse(
            "last_n",
            last_n,
            f"it has {len(each)} entries for {len(lengths)} sequences; give one for all or one for each",
        )
    counts: list[int] = []
    for index, (count, length) in enumerate(zip(each, lengths, strict=True)):
        if type(count) is not int or not 1 <= count <= length:
            refuse("last_n", count, f"expected an integer from 1 to the {length} tokens of sequence {index}")
        counts.append(count)
    return counts


def _given_ids(at: object, positions: Sequence[int], vocabulary: int) -> list[NDArray[np.integer] | None]:
    """Return the ids of each sequence, of shape (positions, width)."""
    if at is None:
        return [None] * len(positions)
    if isinstance(at, str | bytes | bytearray | Mapping) or not (isinstance(at, Iterable) and isinstance(at, Sized)):
        refuse("at", at, f"it is a {type(at).__name__}; expected one array of token ids for each sequence")
    each = list(at)
    if len(each) != len(positions):
        refuse("at", at, f"it has {len(each)} arrays for {len(positions)} sequences; give one for each")
    return [
        _ids(f"at[{index}]", one, count, vocabulary)
        for index, (one, count) in enumerate(zip(each, positions, strict=True))
    ]


def _ids(field: str, value: object, count: int, vocabulary: int) -> NDArray[np.integer]:
    """Return the ids of one sequence after checking them."""
    import numpy as np

    try:
        ids = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidRequest(
            f"{field}={shown(value)}: expected an array of {count} rows of token ids in host memory ({error})",
            field=field,
        ) from None
    if ids.ndim != 2 or ids.shape[0] != count:
        raise InvalidRequest(
            f"{field} has the shape {ids.shape}; expected ({count}, K): a row of token ids for each of the sequence's "
            "tokens, or of the last ones if last_n is given",
            field=field,
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(f"{field} has the dtype {ids.dtype}; expected integers", field=field)
    if not 1 <= ids.shape[1] <= vocabulary or ids.size > MOST_SCORES:
        raise InvalidRequest(
            f"{field} has {ids.shape[1]} ids per position; expected from 1 to the vocabulary's {vocabulary}, "
            f"and at most {MOST_SCORES} ids of a sequence",
            field=field,
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{field}: token id {wrong} is outside the vocabulary of {vocabulary} ids (0 to {vocabulary - 1})",
            field=field,
        )
    return ids
