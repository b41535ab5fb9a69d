"""The result of a push."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain_weight_sync.trainer.strategy import Strategy


@dataclass(frozen=True, slots=True)
class WeightSyncResult:
    """Sizes and timings of a push; times are in seconds."""

    version: str
    strategy: Strategy
    tensors: int
    buckets: int
    nbytes: int
    """Bytes of the tensors, each counted once."""
    sent_nbytes: int
    """Bytes that were sent; fewer than ``nbytes`` if the transport sends only changes."""
    check_seconds: float
    """Time to check names, dtypes, shapes and NaN and to compute digests, while the engine keeps serving."""
    stage_seconds: float
    """Time to copy the tensors to where the engine reads them, while the engine keeps serving."""
    update_seconds: float
    """Time from the update request to the engine's answer."""
    paused_seconds: float
    """The part of ``update_seconds`` during which the engine generated nothing: begin to commit, measured in the
    engine."""
    total_seconds: float
    probe_gap: float | None = None
    """Largest difference in nats between the engine's logprobs and the trainer's; None without a probe."""

    @property
    def gb_per_second(self) -> float:
        """Throughput of the whole push in 10**9 bytes per second."""
        return self.nbytes / self.total_seconds / 1e9
