"""A bucket: the tensors that a trainer broadcasts for one request."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.types.weights import TensorSpec


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A bucket as the trainer announces it, before it broadcasts the tensors."""

    group_name: str
    specs: tuple[TensorSpec, ...]
    flattened: bool
    """True if the tensors come as one uint8 broadcast of their bytes, without gaps; else each is a broadcast."""
    version: str | None = None
    """Version of the weights that the update makes; None: the server counts."""
    abort_requests: bool = False
    """End the requests in flight before the update is applied."""
    refusal: str = ""
    """Reason to receive the bucket and refuse it; empty if there is none."""
