"""Number and choice of the faults that are played."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import Phase, settings

EXAMPLES: Final = int(os.environ.get("FAULTS", "0"))
"""Number of random faults; 0: a few fixed ones."""


def some(few: int, share: float) -> settings:
    """Return settings for a few fixed faults, or for this share of the requested number."""
    return settings(
        max_examples=round(EXAMPLES * share) or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # faults cannot be shrunk
    )
