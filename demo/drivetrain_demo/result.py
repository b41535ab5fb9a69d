"""Result of a demo run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from drivetrain_demo.settings import WINDOW, Settings


@dataclass(frozen=True, slots=True)
class Training:
    """The training after a rollout: one update of the policy, and its push to the engine."""

    entropy: float
    """Mean over the tokens, in nats."""
    train_seconds: float
    sleep_seconds: float | None
    """Time until the engine had freed its KV cache; None: it does not sleep."""
    sync_seconds: float
    """Time of the whole push: checks, staging, transfer, verification, commit."""
    wake_seconds: float | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rollout, and the update that followed it."""

    step: int
    version: str
    """Version of the weights pushed just before the rollout."""
    versions_seen: tuple[str, ...]
    """Versions of all tokens of all completions."""
    reward: float
    """Mean over the completions."""
    accuracy: float
    """Share of completions with the right number."""
    logprob_gap: float
    """Largest |trainer's - engine's| over the tokens, in nats."""
    completions: int
    tokens: int
    """Number of generated tokens."""
    generate_seconds: float
    example: str
    """One prompt and its completion."""
    training: Training | None
    """None after the last rollout, which only measures the last update."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the generate call."""
        return self.tokens / self.generate_seconds


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, with the figures behind it."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A whole run. Its checks depend on the settings; a run ends at the first check that fails."""

    settings: Settings
    backend: str
    isolation: str
    model: str
    dtype: str
    parameters: int
    strategy: str
    """Name of the weight-sync strategy."""
    records: tuple[StepRecord, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    """Deviations from the usual course, with their reasons."""
    seconds: float
    """Time of the whole run, including the engine's start and end."""

    @property
    def ok(self) -> bool:
        """True if every check passed."""
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
        """True if every token was sampled under the version pushed just before its rollout."""
        return all(record.versions_seen == (record.version,) for record in self.records)

    @property
    def sync_seconds_median(self) -> float | None:
        """Median time of the pushes that followed an update; None if there was none."""
        times = [record.training.sync_seconds for record in self.records if record.training]
        return median(times) if times else None

    @property
    def tokens_per_second_median(self) -> float:
        """Median over the rollouts."""
        return median(record.tokens_per_second for record in self.records)


def mean_reward(records: Sequence[StepRecord]) -> float:
    """Return the mean reward of some rollouts."""
    return fmean(record.reward for record in records)
