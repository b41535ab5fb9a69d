# pyright: reportCallIssue=false
"""Quantise many tensors to float8_e4m3fn within a GPU, from where the sender put them to where the engine reads them.

Each number is read once, or twice if a whole tensor shares its scale, and the digests of
:mod:`drivetrain_weight_sync.copying.digest` are computed on the way. No copy in the sender's dtype is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from drivetrain_weight_sync.copying.digest import COLUMNS, finished, weights_on
from drivetrain_weight_sync.copying.fp8_formulas import LARGEST, PER_ROW, PER_TENSOR, Division, Formula, Group

_RECIPROCAL: Final = float(np.float32(1) / np.float32(LARGEST))
_WORD: Final = 8
_NUMBERS: Final = 4
"""Numbers in a word."""
_ROWS: Final = 32
"""Rows in one item of the kernel's table, unless a group has more."""
SHARED_BY = 4
"""Programs that share an item."""
_TILE: Final = 1024
"""Words that a program of four warps holds at once: more of them take so many registers that fewer programs run."""


@dataclass(frozen=True, slots=True)
class Fp8Piece:
    """Rows of one tensor, and the rows of a quantised weight that are made of them."""

    source: torch.Tensor
    """``[rows, columns]`` of bfloat16."""
    destination: torch.Tensor
    """Same shape, float8_e4m3fn."""
    scales: torch.Tensor
    """float32: ``[rows]`` if each row has its scale, ``[blocks of rows, blocks of columns]``, or ``[]`` of a tensor."""
    group: Group
    formula: Formula
    name: str | None = None
    """Key of the source's digest, if the source is a whole tensor of the sender's; None: no digest."""


def fits(piece: Fp8Piece) -> bool:
    """Return whether the kernel can quantise this piece."""
    source, destination, group = piece.source, piece.destination, piece.group
    return (
        source.ndim == 2
        and source.numel() > 0
        and source.dtype == torch.bfloat16
        and source.shape == destination.shape
        and destination.dtype == torch.float8_e4m3fn
        and source.shape[1] % _NUMBERS == 0
        and all(one.stride(1) == 1 and one.stride(0) % _NUMBERS == 0 for one in (source, destination))
        and source.data_ptr() % _WORD == 0
        and destination.data_ptr() % _NUMBERS == 0
        and (piece.name is None or source.is_contiguous())
        and (group.columns is None or (_is_power(group.columns) and _is_power(group.rows or 0)))
    )


def _is_power(number: int) -> bool:
    return number >= _NUMBERS and number & (number - 1) == 0


class _Kind(NamedTuple):
    """Pieces that one launch can quantise."""

    group: Group
    formula: Formula
    words: int
    """Words of a row that a program holds at once, a power of two."""
    one: bool
    """True if these, with the rows that fit beside them, are a whole group."""
    folds: bool
    pairs: bool
    """True if a thread can read two words at once."""

    @classmethod
    def of(cls, piece: Fp8Piece) -> _Kind:
        columns = piece.group.columns or piece.source.shape[1]
        words = 1 << (-(-columns // _NUMBERS) - 1).bit_length()
        rows = 1 if piece.group.columns is None else piece.group.rows or 1
        is_one = words * rows <= _TILE
        steps = piece.source.stride(0) | piece.destination.stride(0) | piece.source.shape[1]
        pairs = (piece.source.data_ptr() | 2 * piece.destination.data_ptr() | 2 * steps) % (2 * _WORD) == 0
        return cls(
            piece.group,
            piece.formula,
            min(words, _TILE),
            is_one,
            piece.name is not None,
            pairs,
        )


@dataclass(frozen=True, slots=True)
class _Launch:
    kind: _Kind
    table: torch.Tensor
    finds: bool
    stores: bool


class Fp8Copies:
    """A batch of pieces that can be quantised repeatedly while the tensors keep their addresses.

    Args:
        pieces: Pieces that pass :func:`fits`, on one device, with distinct names. Pieces whose scale is the same number
            are quantised together.
        found: Memory to which the kernel adds the sums of digests, ``[2, digests]`` of zeros; None: memory of its own.
    """

    def __init__(self, pieces: Sequence[Fp8Piece], found: torch.Tensor | None = None) -> None:
        digested = [piece for piece in pieces if piece.name is not None]
        self.order: list[str] = [piece.name for piece in digested if piece.name is not None]
        """Names of the digested tensors, in the order of their sums."""
        self.ends: np.ndarray = np.array([finished(0, piece.source) for piece in digested], dtype=np.int64)
        """Added to each sum to make it a digest."""
        device = pieces[0].source.device
        self._found = (
            torch.zeros(2, max(len(digested), 1), dtype=torch.int64, device=device) if found is None else found
        )
        places = {id(piece): place for place, piece in enumerate(digested)}
        slots: dict[int, int] = {}
        for piece in pieces:
            if piece.group == PER_TENSOR:
                slots.setdefault(piece.scales.data_ptr(), len(slots))
        self._largest = torch.zeros(max(len(slots), 1), dtype=torch.int32, device=device)
        """Bits of the largest magnitude of each tensor."""
        first_slot = self._largest.data_ptr()
        self._launches: list[_Launch] = []
        of_kinds: dict[_Kind, list[Fp8Piece]] = {}
        for piece in pieces:
            of_kinds.setdefault(_Kind.of(piece), []).append(piece)
        stores: list[_Launch] = []
        for kind, some in of_kinds.items():
            indices = [places.get(id(piece), -1) for piece in some]
            slots_of = [first_slot + 4 * slots.get(piece.scales.data_ptr(), 0) for piece in some]
            if kind.group != PER_TENSOR:
                table = _table(some, kind, indices, [piece.scales.data_ptr() for piece in some], None)
                stores.append(_Launch(kind, torch.from_numpy(table).to(device), True, True))
            else:
                table = _table(some, kind, indices, slots_of, None)
                self._launches.append(_Launch(kind, torch.from_numpy(table).to(device), True, False))
                table = _table(some, kind, indices, [piece.scales.data_ptr() for piece in some], slots_of)
                folded = kind._replace(folds=False)
                stores.append(_Launch(folded, torch.from_numpy(table).to(device), False, True))
        self._launches += stores
        weights = weights_on(device)
        rows = max(piece.source.numel() // (_NUMBERS * COLUMNS) for piece in pieces) + 2
        self._weights = weights.a, weights.b, weights.per_row(rows)

    def enqueue(self) -> None:
        """Launch the kernels, which add to ``found``."""
        from drivetrain_weight_sync.copying.fp8_kernel import quantise_groups

        self._largest.zero_()
        for launch in self._launches:
            kind, formula, group = launch.kind, launch.kind.formula, launch.kind.group
            rows = 1 if group.columns is None else group.rows or 1
            is_product = formula.quotient in (Division.BY_INVERSE, Division.BY_APPROXIMATE_INVERSE)
            quantise_groups[(len(launch.table) * SHARED_BY,)](
                launch.table,
                *self._weights,
                self._found[0],
                LARGEST,
                _RECIPROCAL,
                formula.least,
                formula.least_scale,
                formula.zero,
                formula.scale.value,
                formula.quotient.value,
                GROUP_ROWS=rows,
                GROUP_WORDS=(group.columns or 0) // _NUMBERS,
                ROWS=min(rows, max(_TILE // kind.words, 1)),
                WORDS=kind.words,
                ONE=kind.one,
                SHARED_BY=SHARED_BY,
                FINDS=launch.finds,
                STORES=launch.stores,
                FOLDS=kind.folds,
                PAIRS=kind.pairs and not kind.folds,
                DIVIDES=(Division.BY_INVERSE if is_product else formula.quotient).value,
                num_warps=4 if group.columns is None else 8,
            )

    def digests(self) -> dict[str, int]:
        """Launch the kernels, and return the digests of the named tensors."""
        self._found.zero_()
        self.enqueue()
        values: list[int] = (self._found[0, : len(self.order)].cpu().numpy() + self.ends).tolist()
        return dict(zip(self.order, values, strict=True))


def _table(
    pieces: Sequence[Fp8Piece], kind: _Kind, indices: Sequence[int], scales: Sequence[int], slots: Sequence[int] | None
) -> np.ndarray:
    """Return the kernel's table, int64 ``[items, 10]``.

    Columns: addresses of the source, the destination and the scales; number of rows and of words in each; steps from
    one row to the next of the source in words and of the destination in 32 bits, and from one group's scale to the next
    one's in 32 bits; first word in its tensor, or address of the largest magnitude; index of the digest (-1: none).
    """
    step = kind.group.rows if kind.group.columns is not None else _ROWS
    assert step is not None
    items: list[np.ndarray] = []
    for number, piece in enumerate(pieces):
        rows, columns = piece.source.shape
        begins = np.arange(0, rows, step, dtype=np.int64)
        item = np.empty((len(begins), 10), dtype=np.int64)
        source_step, destination_step = piece.source.stride(0), piece.destination.stride(0)
        item[:, 0] = piece.source.data_ptr() + begins * source_step * piece.source.itemsize
        item[:, 1] = piece.destination.data_ptr() + begins * destination_step
        item[:, 2] = scales[number]
        item[:, 7] = 0
        if kind.group == PER_ROW:
            item[:, 2] += begins * piece.scales.stride(0) * 4
            item[:, 7] = piece.scales.stride(0)
        elif kind.group != PER_TENSOR:
            item[:, 2] += np.arange(len(begins)) * piece.scales.stride(0) * 4
            item[:, 7] = piece.scales.stride(1)
        item[:, 3] = np.minimum(rows - begins, step)
        item[:, 4] = columns // _NUMBERS
        item[:, 5] = source_step // _NUMBERS
        item[:, 6] = destination_step // _NUMBERS
        item[:, 8] = begins * (source_step // _NUMBERS) if slots is None else slots[number]
        item[:, 9] = indices[number]
        items.append(item)
    return np.concatenate(items)
