"""A bucket: the tensors that a trainer broadcasts for one request."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from drivetrain.types.weights import TensorSpec

WHOLE: Final = sys.maxsize
"""``chunk_bytes`` of a bucket that comes as one broadcast."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A bucket as the trainer announces it, before it broadcasts the tensors."""

    group_name: str
    specs: tuple[TensorSpec, ...]
    chunk_bytes: int | None
    """Size from which a chunk is broadcast: tensors are joined as bytes until they are larger. None: each tensor is a
    broadcast of its own."""
    version: str | None = None
    """Version of the weights that the update makes; None: the server counts."""
    abort_requests: bool = False
    """End the requests in flight before the update is applied."""
    refusal: str = ""
    """Reason to receive the bucket and refuse it; empty if there is none."""
