"""Profiles: how much work a run of the suite does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Profile:
    """The sizes of a run."""

    name: str
    examples: int
    """Hypothesis examples of each property."""
    histories: int
    """Histories that the stateful machine plays."""
    steps: int
    """Steps of each history."""
    samples: int
    """Draws for each statistical test."""
    cycles: int
    """Sleep cycles and weight updates over which memory growth is measured."""
    case_timeout: float
    """Timeout of one case, in seconds."""
    needs_gpu: bool = False
    """Refuse to run where there is no GPU."""
    slow_cases: bool = True
    """Run the cases that are marked as slow; without them they are *not run*."""


LEFT_OUT: Final = "a slow case, which the profile leaves out"
"""The reason for which a profile without slow cases does not run one."""

PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("quick", examples=5, histories=3, steps=8, samples=1024, cycles=10, case_timeout=120, slow_cases=False),
        Profile("smoke", examples=5, histories=3, steps=8, samples=1024, cycles=10, case_timeout=120),
        Profile("ci", examples=30, histories=15, steps=20, samples=4096, cycles=50, case_timeout=300),
        Profile("gpu", examples=50, histories=30, steps=30, samples=8192, cycles=50, case_timeout=600, needs_gpu=True),
    )
}
