"""What a run of the demo returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from drivetrain_demo.settings import WINDOW, Settings


@dataclass(frozen=True, slots=True)
class Training:
    """What followed a rollout: one update of the policy, and its way into the engine."""

    entropy: float
    """Mean over the tokens, in nats."""
    train_seconds: float
    sleep_seconds: float | None
    """Until the engine had given back its KV cache; None: it does not sleep."""
    sync_seconds: float
    """Of the whole push: checks, staging, transfer, verification, commit."""
    wake_seconds: float | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rollout, and the update that followed it."""

    step: int
    version: str
    """Of the weights that were pushed just before."""
    versions_seen: tuple[str, ...]
    """Of all tokens of all completions."""
    reward: float
    """Mean over the completions."""
    accuracy: float
    """Share of completions with the right number."""
    logprob_gap: float
    """Largest |trainer's - engine's| over the tokens, in nats."""
    completions: int
    tokens: int
    """Generated."""
    generate_seconds: float
    example: str
    """One prompt and what was generated."""
    training: Training | None
    """None after the last rollout, which only looks at what the last update did."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the generate call."""
        return self.tokens / self.generate_seconds


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and the figures that say whether it does."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A whole run. Which checks there are depends on the settings; a run that failed one ended there."""

    settings: Settings
    backend: str
    isolation: str
    model: str
    dtype: str
    parameters: int
    strategy: str
    """How the weights travelled."""
    records: tuple[StepRecord, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    """What was done otherwise than asked by default, and why."""
    seconds: float
    """Of the whole run, the engine's start and end included."""

    @property
    def ok(self) -> bool:
        """Every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def reward_first(self) -> float:
        """Mean reward of the first rollouts."""
        return mean_reward(self.records[:WINDOW])

    @property
    def reward_last(self) -> float:
        """Mean reward of the last rollouts."""
        return mean_reward(self.records[-WINDOW:])

    @property
    def max_logprob_gap(self) -> float:
        """Largest logprob gap of all rollouts, in nats."""
        return max(record.logprob_gap for record in self.records)

    @property
    def weight_versions_ok(self) -> bool:
        """Every token of every rollout was sampled under the version pushed just before."""
        return all(record.versions_seen == (record.version,) for record in self.records)

    @property
    def sync_seconds_median(self) -> float | None:
        """Median of the pushes that followed an update; None when there was none."""
        times = [record.training.sync_seconds for record in self.records if record.training]
        return median(times) if times else None

    @property
    def tokens_per_second_median(self) -> float:
        """Median over the rollouts."""
        return median(record.tokens_per_second for record in self.records)


def mean_reward(records: Sequence[StepRecord]) -> float:
    """Mean reward of some rollouts."""
    return fmean(record.reward for record in records)
