"""Allowed differences between an engine's logprobs and those of a float32 forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

TOLERANCE: Final[Mapping[str, float]] = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
"""Tolerance of logprobs, in nats, by the engine's dtype."""
ROUGHEST: Final = 1.4
"""Most that a 16-bit engine's errors may be, as root mean square, in multiples of rounding's own.

Errors of an engine that rounds to its dtype are 0.6 to 0.8 of those that rounding the weights alone makes, and 0.99 to
1.01 of those that transformers makes in the same dtype. An engine that keeps decoded keys and values in 8 bits comes to
2 of the former.
"""


def tolerance_of(dtype: str) -> float:
    """Return the tolerance of an engine of this dtype, in nats; an unknown dtype counts as bfloat16."""
    return TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def rounding_explains(off: NDArray[np.float64], tolerance: float) -> bool:
    """Return True if rounding explains these differences: in bfloat16, about one in a hundred exceeds the tolerance.

    Args:
        off: Absolute differences of logprobs in nats, at least one.
        tolerance: The tolerance of the engine's dtype, in nats.
    """
    return bool(np.quantile(off, 0.99) <= tolerance and off.max() <= 2 * tolerance)
