"""How many faults are played, and which."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import Phase, settings

EXAMPLES: Final = int(os.environ.get("FAULTS", "0"))
"""How many are drawn by chance; 0: a few, always the same."""


def some(few: int, share: float) -> settings:
    """A few faults, always the same, or this share of those that were asked for."""
    return settings(
        max_examples=round(EXAMPLES * share) or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a fault is as small as it gets
    )
