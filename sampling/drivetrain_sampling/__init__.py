"""Sampling parameters as torch operations on a batch of logits.

The transformers backend samples every token here. Backends of engines with their own sampler use this for requests on
which that sampler differs from :class:`~drivetrain.types.sampling.SamplingParams`.
"""

from __future__ import annotations

from drivetrain.checks.extras import from_extra

with from_extra("weight-sync", "drivetrain_sampling"):
    from drivetrain_sampling.sampler import (
        NO_TOKEN,
        NOT_FINITE,
        Choice,
        Drawn,
        Row,
        Sampler,
        drawable,
        failures_of,
        top_logprobs,
        uniform,
    )

__all__ = [
    "NOT_FINITE",
    "NO_TOKEN",
    "Choice",
    "Drawn",
    "Row",
    "Sampler",
    "drawable",
    "failures_of",
    "top_logprobs",
    "uniform",
]
