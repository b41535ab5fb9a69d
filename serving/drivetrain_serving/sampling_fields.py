"""Values of sampling parameters that both dialects write in another way than ``SamplingParams``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

_SEEDS: Final = (1 << 63) - 1


def seed_of(seed: int) -> int:
    """Return a seed that engines take: a negative one keeps its other 63 bits."""
    return seed & _SEEDS if seed < 0 else seed


def ids_from_json(biases: object) -> object:
    """Return token ids as integers, which the keys of a JSON object are not."""
    if not isinstance(biases, Mapping):
        return biases
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in biases.items()}


def regex_of_choices(choices: Iterable[str]) -> str:
    """Return the regular expression that matches exactly the given texts."""
    return "|".join(f"(?:{re.escape(one)})" for one in choices)
