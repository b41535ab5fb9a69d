"""The KV cache of a running batch whose rows join and leave between steps.

Rows are aligned at their newest token, so that one step appends one column for rows of all lengths;
columns to the left of a row's first token are masked. This is the layout of a left-padded batch, which every causal LM
of transformers handles, so nothing here depends on the architecture.

            start             end
    row 0     . . . a b c d e f
    row 1     . g h i j k l m n        a step writes column `end` and increments it
    row 2     o p q r s t u v w

Recurrent states have no columns: a step replaces a row's state in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from drivetrain_transformers.decode_graphs import DecodeGraphs, FixedStep, Shape, columns_of_step, rows_of_step
from drivetrain_transformers.recurrent_states import RecurrentLayer, Slot, States, is_recurrent, put_states, states_of

_HEADROOM = 128


@dataclass(frozen=True, slots=True)
class RowCache:
    """The cache of one row's first tokens."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each attention layer, of shape (1, heads, tokens, head size)."""
    states: States
    """Recurrent states after the last of the tokens, of shape (1, …)."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.pairs) + sum(
            state.nbytes for state in self.states.values()
        )


class _Window(DynamicLayer):
    """One layer's keys and values between ``start`` and ``end``; an update writes the next column."""

    def __init__(self, owner: RunningCache, index: int) -> None:
        DynamicLayer.__init__(self)
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


class _WindowAndStates(_Window, RecurrentLayer):  # type: ignore[misc]  # its base is found at run time
    """A layer with attention and recurrent states side by side."""

    def __init__(self, owner: RunningCache, index: int, number_of_states: int) -> None:
        _Window.__init__(self, owner, index)
        RecurrentLayer.__init__(self, number_of_states=number_of_states)


class RunningCache(Cache):
    """Keys, values and recurrent states of every running row.

    Buffers of keys and values have shape (rows, heads, columns, head size), those of states (rows, …).

    Args:
        graphs: CUDA graphs of steps on these buffers; they are dropped when the buffers change.
    """

    def __init__(self, graphs: DecodeGraphs | None = None) -> None:
        super().__init__(layers=[])
        self.graphs = graphs
        self._fixed: FixedStep | None = None
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._states: dict[Slot, torch.Tensor] = {}
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
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values, *self._states.values()))

    @property
    def end(self) -> int:
        """Column of the next token."""
        return self._end

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._mask.device

    def shape_of_step(self) -> Shape:
        """Return the rows and columns that a step computes whose tensors are fixed."""
        rows, columns = self._mask.shape
        return Shape(rows_of_step(self.rows, rows), *columns_of_step(self._start, self._end + 1, columns))

    @contextmanager
    def fixed(self, step: FixedStep) -> Iterator[torch.Tensor]:
        """Limit writes and reads inside the block to the fixed step's rows and columns; yield its attention mask."""
        self._fixed = step
        try:
            yield step.mask(self._mask[: step.shape.rows, step.shape.start : step.shape.end])
        finally:
            self._fixed = None

    def attention_mask(self) -> torch.Tensor:
        """Return the mask of columns in use and the next one, shape (rows, width + 1); 1 where a row has a token."""
        return self._mask[: self.rows, self._start : self._end + 1]

    def admit(self, prefilled: Cache, source_rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Append rows from a prefilled, left-padded cache: row ``source_rows[i]``, its last ``lengths[i]`` tokens."""
        incoming, states = keys_and_values(prefilled), states_of(prefilled)
        longest, first, count = max(lengths), self.rows, len(lengths)
        if not self.layers:
            self.layers = _layers(self, prefilled)
        if not self._fits(first + count, longest):
            self._lay_out(incoming, states, first + count, max(self.width, longest))
        if not self.lengths:
            self._start = self._end = longest
        index = torch.tensor(list(source_rows), device=self._mask.device)
        whole = list(source_rows) == list(range(_rows(prefilled)))
        for own, theirs in zip((*self._keys, *self._values), _flat(incoming), strict=True):
            rows = theirs if whole else theirs.index_select(0, index)
            own[first : first + count, :, self._end - longest : self._end] = rows[:, :, rows.shape[-2] - longest :]
        for slot, state in states.items():
            self._states[slot][first : first + count] = state if whole else state.index_select(0, index)
        for offset, length in enumerate(lengths):
            row = self._mask[first + offset]
            row.zero_()
            row[self._end - length : self._end] = 1
        self.lengths.extend(lengths)
        self._start = self._end - max(self.lengths)
        self._show_states()

    def release(self, row: int) -> int:
        """Drop a row; the last row takes its place. Return the former index of that last row."""
        last = self.rows - 1
        if row != last:
            span = slice(self._end - self.lengths[last], self._end)
            for buffer in (*self._keys, *self._values):
                buffer[row, :, span] = buffer[last, :, span]
            for state in self._states.values():
                state[row] = state[last]
            self._mask[row] = self._mask[last]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._start = self._end - max(self.lengths) if self.lengths else self._end
        self._show_states()
        return last

    def erase(self, row: int) -> None:
        """Zero a row before it is released: attention multiplies masked values by 0, and NaN times 0 is NaN."""
        for buffer in (*self._keys, *self._values, *self._states.values()):
            buffer[row].zero_()

    def read(self, row: int, length: int) -> RowCache:
        """Copy the cache of a row's first ``length`` tokens; with recurrent states, of all its tokens."""
        assert not self._states or length == self.lengths[row], "recurrent states cannot be cut back"
        begin = self._end - self.lengths[row]
        span = slice(begin, begin + length)
        pairs = [
            (keys[row : row + 1, :, span].clone(), values[row : row + 1, :, span].clone())
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        return RowCache(pairs, {slot: state[row : row + 1].clone() for slot, state in self._states.items()})

    def open_column(self) -> None:
        """Make room for one more token in every row, before a step."""
        if self._end >= self._mask.shape[1]:
            own = list(zip(self._keys, self._values, strict=True))
            self._lay_out(own, self._states, self.rows, self.width)
        self._mask[: self.rows, self._end] = 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new column; return the layer's keys and values, the new column included."""
        if self._fixed is not None:
            return self._fixed.write(self._keys[layer], keys), self._fixed.write(self._values[layer], values)
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

    def drop_graphs(self) -> None:
        """Drop the graphs of steps: the memory that they read is about to change."""
        if self.graphs is not None:
            self.graphs.drop()

    def clear(self, *, free: bool = False) -> None:
        """Drop every row, and with ``free`` the memory too."""
        self.lengths = []
        self._start = self._end = 0
        if free:
            self.drop_graphs()
            self._keys, self._values, self._states, self.layers = [], [], {}, []
            self._mask = torch.zeros(0, 0, dtype=torch.long)

    def _fits(self, rows: int, longest: int) -> bool:
        capacity_rows, capacity_columns = self._mask.shape
        end = self._end if self.lengths else longest
        return rows <= capacity_rows and longest <= end < capacity_columns

    def _show_states(self) -> None:
        """Give the layers the states of the rows in use."""
        put_states(self.layers, {slot: state[: self.rows] for slot, state in self._states.items()})

    def _lay_out(self, like: list[tuple[torch.Tensor, torch.Tensor]], states: States, rows: int, width: int) -> None:
        """Move to buffers for ``rows`` rows, with the newest token in column ``width`` and room beyond it."""
        self.drop_graphs()
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

        device = _flat(like)[0].device if like else next(iter(states.values())).device
        mask = torch.zeros(capacity, columns, dtype=torch.long, device=device)
        if used:
            mask[:used, new] = self._mask[:used, old]
        self._keys = moved(self._keys, [keys for keys, _ in like])
        self._values = moved(self._values, [values for _, values in like])
        for slot, model in states.items():
            fresh = model.new_zeros(capacity, *model.shape[1:])
            if used:
                fresh[:used] = self._states[slot][:used]
            self._states[slot] = fresh
        self._mask = mask
        self._start, self._end = new.start, new.stop
        self._show_states()


def _layers(owner: RunningCache, prefilled: Cache) -> list[Any]:
    """Return layers of the running batch for those of a prefilled cache."""
    layers: list[Any] = []
    attention = 0
    layer: Any
    for layer in prefilled.layers:
        if not isinstance(layer, CacheLayerMixin):
            # A layer without keys and values: recurrent, or one that keeps nothing.
            layers.append(RecurrentLayer(number_of_states=layer.number_of_states) if is_recurrent(layer) else layer)
            continue
        states = getattr(layer, "number_of_states", 0)
        if is_recurrent(layer):
            layers.append(_WindowAndStates(owner, attention, states))
        else:
            layers.append(_Window(owner, attention))
        attention += 1
    return layers


def _rows(cache: Cache) -> int:
    """Return the number of rows of a filled cache."""
    pairs = keys_and_values(cache)
    return pairs[0][0].shape[0] if pairs else next(iter(states_of(cache).values())).shape[0]


def row_cache(cache: Cache, row: int, length: int) -> RowCache:
    """Copy a row's ``length`` tokens, the last columns, from a left-padded cache."""
    pairs = [
        (keys[row : row + 1, :, -length:].clone(), values[row : row + 1, :, -length:].clone())
        for keys, values in keys_and_values(cache)
    ]
    return RowCache(pairs, {slot: state[row : row + 1].clone() for slot, state in states_of(cache).items()})


def keys_and_values(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each attention layer of a filled cache; shape (rows, heads, columns, head size)."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in cache.layers:
        if not isinstance(layer, CacheLayerMixin):
            continue
        assert layer.keys is not None
        assert layer.values is not None
        pairs.append((layer.keys, layer.values))
    return pairs


def _flat(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [keys for keys, _ in pairs] + [values for _, values in pairs]
