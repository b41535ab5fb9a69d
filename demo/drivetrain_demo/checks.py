"""Checks of a run, as pure functions of its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drivetrain import Completion
from drivetrain_demo.result import Check, StepRecord, mean_reward
from drivetrain_demo.settings import WINDOW, Settings

VERSIONS = "weight versions"
LOGPROBS = "logprobs"
RISE = "reward rise"


def versions_seen(completions: Iterable[Completion]) -> tuple[str, ...]:
    """Return the versions that the completions' spans name, sorted; a token without a span counts as one."""
    seen: set[str] = set()
    for completion in completions:
        if not completion.token_ids:
            seen.add("none (a completion without tokens)")
        at = 0
        for span in completion.weight_versions:
            if span.start != at:
                seen.add(f"none (tokens {at} to {span.start})")
            seen.add(span.version)
            at = span.end
        if at != len(completion.token_ids):
            seen.add(f"none (tokens {at} to {len(completion.token_ids)})")
    return tuple(sorted(seen))


def check_versions(records: Sequence[StepRecord]) -> Check:
    """Check that every token was sampled under the version that was pushed just before its rollout."""
    for record in records:
        if record.versions_seen != (record.version,):
            return Check(
                VERSIONS,
                False,
                f"step {record.step}: the completions carry {', '.join(record.versions_seen) or 'no version'}; "
                f"expected {record.version} on every token",
            )
    tokens = sum(record.tokens for record in records)
    return Check(VERSIONS, True, f"all {tokens} tokens carry the version that was pushed just before them")


def check_logprobs(records: Sequence[StepRecord], tolerance: float) -> Check:
    """Check that engine and trainer give every token the same logprob, within ``tolerance`` nats."""
    for record in records:
        if not record.logprob_gap <= tolerance:
            return Check(
                LOGPROBS,
                False,
                f"step {record.step}: engine and trainer differ by up to {record.logprob_gap:.3g} nats; "
                f"at most {tolerance:g} is allowed",
            )
    largest = max(record.logprob_gap for record in records)
    return Check(LOGPROBS, True, f"engine and trainer differ by at most {largest:.2g} nats (allowed: {tolerance:g})")


def check_rise(records: Sequence[StepRecord], settings: Settings) -> Check:
    """Check that the mean reward of the last rollouts is at least ``min_rise`` above that of the first."""
    first, last = mean_reward(records[:WINDOW]), mean_reward(records[-WINDOW:])
    return Check(
        RISE,
        last - first >= settings.min_rise,
        f"from {first:.3f} (first {WINDOW} rollouts) to {last:.3f} (last {WINDOW}): "
        f"{last - first:+.3f}; at least {settings.min_rise:+.3f} is expected",
    )
