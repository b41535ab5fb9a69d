"""Caches of running rows that are each computed alone."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.cache_utils import Cache

from drivetrain_transformers.kv_cache import RowCache, RunningCache


class SeparateCaches:
    """A cache for each running row, in place of one for all of them.

    The strides of a row's buffers depend on its own length only, not on earlier rows.
    """

    def __init__(self) -> None:
        self._rows: list[RunningCache] = []

    def __getitem__(self, row: int) -> RunningCache:
        """Return a row's cache, in which it is the only row."""
        return self._rows[row]

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row."""
        return [cache.lengths[0] for cache in self._rows]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(cache.nbytes for cache in self._rows)

    def admit(self, prefilled: Cache, source_rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Append rows, as :meth:`RunningCache.admit` does."""
        for row, length in zip(source_rows, lengths, strict=True):
            self._rows.append(RunningCache())
            self._rows[-1].admit(prefilled, [row], [length])

    def release(self, row: int) -> int:
        """Drop a row; the last row takes its place. Return the former index of that last row."""
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last
        return len(self._rows)

    def erase(self, row: int) -> None:
        """Do nothing: no other row uses a row's buffers."""

    def drop_graphs(self) -> None:
        """Do nothing: rows that are computed alone are computed without graphs."""

    def read(self, row: int, length: int) -> RowCache:
        """Copy the cache of a row's first ``length`` tokens."""
        return self._rows[row].read(0, length)

    def clear(self, *, free: bool = False) -> None:
        """Drop every row, and its memory."""
        self._rows = []
