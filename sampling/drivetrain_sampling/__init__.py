"""What sampling params mean, as torch operations on a batch of logits: for engines that have no meaning of their own.

The transformers backend draws every token here. Backends of engines with a sampler draw here what that sampler does
otherwise than :class:`~drivetrain.sampling.SamplingParams` says, or not at all.
"""

from __future__ import annotations

from drivetrain_sampling.sampler import Choice, Drawn, Row, Sampler, top_logprobs, uniform

__all__ = ["Choice", "Drawn", "Row", "Sampler", "top_logprobs", "uniform"]
