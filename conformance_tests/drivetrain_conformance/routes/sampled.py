"""Answers whose logprobs tell the weights that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer, sampled at temperature 1 without filters."""

    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
