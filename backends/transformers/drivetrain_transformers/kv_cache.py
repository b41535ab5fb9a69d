"""The KV cache of a running batch whose rows join and leave between steps.

Rows are aligned at their newest token, so that one step appends one column for all of them, whatever their lengths;
columns to the left of a row's first token are masked. This is the layout of a left-padded batch, which every causal LM
of transformers handles, so nothing here depends on the architecture.

            start             end
    row 0     . . . a b c d e f
    row 1     . g h i j k l m n        a step writes column `end` and increments it
    row 2     o p q r s t u v w
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

_HEADROOM = 128


class _Window(DynamicLayer):
    """One layer's keys and values between ``start`` and ``end``; an update writes the next column."""

    def __init__(self, owner: RunningCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
        self._owner = owner
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._owner.write(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._owner.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.width + query_length, 0


class RunningCache(Cache):
    """Keys and values of every running row. All buffers have shape (rows, heads, columns, head size)."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._start = 0
        self._end = 0
        self.lengths: list[int] = []
        """Tokens in each row."""

    @property
    def rows(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Columns in use."""
        return self._end - self._start

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def attention_mask(self) -> torch.Tensor:
        """Return the mask of columns in use and the next one, shape (rows, width + 1); 1 where a row has a token."""
        return self._mask[: self.rows, self._start : self._end + 1]

    def admit(self, prefilled: Cache, source_rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Append rows from a prefilled, left-padded cache: row ``source_rows[i]``, its last ``lengths[i]`` tokens."""
        incoming = keys_and_values(prefilled)
        longest, first, count = max(lengths), self.rows, len(lengths)
        columns = incoming[0][0].shape[-2]
        if not self._keys or not self._fits(first + count, longest):
            self._lay_out(incoming, first + count, max(self.width, longest))
        if not self.lengths:
            self._start = self._end = longest
        whole = list(source_rows) == list(range(incoming[0][0].shape[0]))
        index = None if whole else torch.tensor(list(source_rows), device=incoming[0][0].device)
        for own, theirs in zip((*self._keys, *self._values), _flat(incoming), strict=True):
            rows = theirs if index is None else theirs.index_select(0, index)
            own[first : first + count, :, self._end - longest : self._end] = rows[:, :, columns - longest :]
        for offset, length in enumerate(lengths):
            row = self._mask[first + offset]
            row.zero_()
            row[self._end - length : self._end] = 1
        self.lengths.extend(lengths)
        self._start = self._end - max(self.lengths)

    def release(self, row: int) -> int:
        """Drop a row; the last row takes its place. Return the former index of that last row."""
        last = self.rows - 1
        if row != last:
            span = slice(self._end - self.lengths[last], self._end)
            for buffer in (*self._keys, *self._values):
                buffer[row, :, span] = buffer[last, :, span]
            self._mask[row] = self._mask[last]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._start = self._end - max(self.lengths) if self.lengths else self._end
        return last

    def erase(self, row: int) -> None:
        """Zero a row before it is released: attention multiplies masked values by 0, and NaN times 0 is NaN."""
        for buffer in (*self._keys, *self._values):
            buffer[row].zero_()

    def read(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy the first ``length`` tokens of a row: keys and values per layer, shape (1, heads, length, head size)."""
        begin = self._end - self.lengths[row]
        span = slice(begin, begin + length)
        return [
            (keys[row : row + 1, :, span].clone(), values[row : row + 1, :, span].clone())
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def open_column(self) -> None:
        """Make room for one more token in every row, before a step."""
        if self._end >= self._mask.shape[1]:
            self._lay_out(list(zip(self._keys, self._values, strict=True)), self.rows, self.width)
        self._mask[: self.rows, self._end] = 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new column; return the layer's keys and values, the new column included."""
        rows, end = self.rows, self._end
        own_keys, own_values = self._keys[layer], self._values[layer]
        own_keys[:rows, :, end : end + 1] = keys
        own_values[:rows, :, end : end + 1] = values
        window = slice(self._start, end + 1)
        return own_keys[:rows, :, window], own_values[:rows, :, window]

    def close_column(self) -> None:
        """Count the new token in every row, after a step."""
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def clear(self, *, free: bool = False) -> None:
        """Drop every row, and with ``free`` the memory too."""
        self.lengths = []
        self._start = self._end = 0
        if free:
            self._keys, self._values, self.layers = [], [], []
            self._mask = torch.zeros(0, 0, dtype=torch.long)

    def _fits(self, rows: int, longest: int) -> bool:
        capacity_rows, capacity_columns = self._mask.shape
        end = self._end if self.lengths else longest
        return rows <= capacity_rows and longest <= end < capacity_columns

    def _lay_out(self, like: list[tuple[torch.Tensor, torch.Tensor]], rows: int, width: int) -> None:
        """Move to buffers for ``rows`` rows, with the newest token in column ``width`` and room beyond it."""
        capacity = self._mask.shape[0] if rows <= self._mask.shape[0] else max(rows, 2 * self._mask.shape[0])
        columns = width + max(_HEADROOM, width // 2)
        used, old = self.rows, slice(self._start, self._end)
        new = slice(width - self.width, width)

        def moved(buffers: list[torch.Tensor], likes: list[torch.Tensor]) -> list[torch.Tensor]:
            grown = []
            for position, model in enumerate(likes):
                _, heads, _, size = model.shape
                # Zeros: a masked column must not hold a NaN, which attention would spread.
                fresh = model.new_zeros(capacity, heads, columns, size)
                if used:
                    fresh[:used, :, new] = buffers[position][:used, :, old]
                grown.append(fresh)
            return grown

        mask = torch.zeros(capacity, columns, dtype=torch.long, device=like[0][0].device)
        if used:
            mask[:used, new] = self._mask[:used, old]
        self._keys = moved(self._keys, [keys for keys, _ in like])
        self._values = moved(self._values, [values for _, values in like])
        self._mask = mask
        self._start, self._end = new.start, new.stop
        if len(self.layers) != len(like):
            self.layers = [_Window(self, index) for index in range(len(like))]


def keys_and_values(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each layer of a filled cache; shape (rows, heads, columns, head size)."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in cache.layers:
        assert isinstance(layer, CacheLayerMixin)
        assert layer.keys is not None
        assert layer.values is not None
        pairs.append((layer.keys, layer.values))
    return pairs


def _flat(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [keys for keys, _ in pairs] + [values for _, values in pairs]
