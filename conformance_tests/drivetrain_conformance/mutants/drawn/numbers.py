"""Numbers of drawn mutants."""

from __future__ import annotations

import math
import random
import struct
from typing import cast


def log_number(rng: random.Random, low: float, high: float) -> float:
    """Draw a number of three digits, each order of magnitude as often as any other."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def log_count(rng: random.Random, low: int, high: int) -> int:
    """Draw a whole number in this way."""
    return round(log_number(rng, low, high))


def in_bfloat16(value: float) -> float:
    """Return a number rounded to bfloat16."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return cast(float, rounded)


def in_float16(value: float) -> float:
    """Return a number rounded to float16, or the nearest that it holds."""
    most = 65504.0
    (rounded,) = struct.unpack("<e", struct.pack("<e", max(-most, min(value, most))))
    return cast(float, rounded)
