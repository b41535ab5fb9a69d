"""What sampling params mean, as torch operations on a batch of logits: for engines that have no meaning of their own.

The transformers backend draws every token here. Backends of engines with a sampler draw here what that sampler does
otherwise than :class:`~drivetrain.types.sampling.SamplingParams` says, or not at all.
"""

from __future__ import annotations

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
