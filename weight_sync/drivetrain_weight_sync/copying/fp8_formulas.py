"""The arithmetic by which engines quantise to float8_e4m3fn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Group:
    """The numbers that share a scale: ``rows`` and ``columns`` of a matrix; None: all."""

    rows: int | None
    columns: int | None


PER_TENSOR: Final = Group(None, None)
PER_ROW: Final = Group(1, None)


class Division(Enum):
    """A division in an engine's float32 arithmetic."""

    EXACT = 0
    """Rounded to nearest."""
    APPROXIMATE = 1
    """As Triton's ``/`` divides; off by up to two units in the last place."""
    BY_INVERSE = 2
    """Multiplication by the inverse, which was rounded to nearest."""
    BY_APPROXIMATE_INVERSE = 3


@dataclass(frozen=True, slots=True)
class Formula:
    """The float32 arithmetic of an engine's quantisation; engines differ in the last bit."""

    scale: Division
    """Divides the largest magnitude by 448 and gives the scale."""
    quotient: Division
    """Divides a number by the scale and gives the number that is rounded to fp8."""
    least: float = 0.0
    """Smallest number that counts as the largest magnitude."""
    least_scale: float = 0.0
    zero: float = -0.0
    """Added to numbers whose scale is 0, each times 0: a 0 of their sign, NaN, or the largest number of fp8."""


_LEAST_SCALE: Final = 1 / (LARGEST * 512)
_EXACTLY: Final = Division.EXACT, Division.BY_INVERSE
_APPROXIMATELY: Final = Division.APPROXIMATE, Division.BY_APPROXIMATE_INVERSE
_OF_BLOCKS: Final = tuple(
    Formula(*divisions, least=1e-4)
    for divisions in (
        _EXACTLY,
        _APPROXIMATELY,
        (Division.BY_INVERSE, Division.BY_APPROXIMATE_INVERSE),
        (Division.BY_INVERSE, Division.BY_INVERSE),
        (Division.EXACT, Division.BY_APPROXIMATE_INVERSE),
    )
)
_OF_OTHERS: Final = (
    *(
        Formula(*divisions, zero=zero)
        for divisions in (_EXACTLY, _APPROXIMATELY)
        for zero in (-0.0, math.nan, LARGEST)  # the last is that of a clamp, for which NaN counts as too large
    ),
    *(Formula(*divisions, least=1e-10) for divisions in (_EXACTLY, _APPROXIMATELY)),
    Formula(Division.EXACT, Division.EXACT, least_scale=_LEAST_SCALE),
    Formula(Division.APPROXIMATE, Division.APPROXIMATE, least=1e-10),
)


def formulas(group: Group) -> Sequence[Formula]:
    """Return the formulas that engines take for a group; those that share a compiled kernel follow each other."""
    return _OF_OTHERS if group.columns is None else _OF_BLOCKS
