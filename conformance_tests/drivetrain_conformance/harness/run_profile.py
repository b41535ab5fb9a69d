"""How much work a run of the suite does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes of a run."""

    name: str
    examples: int
    """Examples of each property."""
    histories: int
    """Histories of the stateful machine."""
    steps: int
    """Steps of one history."""
    samples: int
    """Draws for a statistical test."""
    cycles: int
    """Sleep cycles and updates that are looked at for growth."""
    case_timeout: float
    """Seconds after which a case that has not ended counts as hanging."""
    needs_gpu: bool = False
    """Refuse to run where there is no GPU."""


PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("smoke", examples=5, histories=3, steps=8, samples=1024, cycles=10, case_timeout=120),
        Profile("ci", examples=30, histories=15, steps=20, samples=4096, cycles=50, case_timeout=300),
        Profile("gpu", examples=50, histories=30, steps=30, samples=8192, cycles=50, case_timeout=600, needs_gpu=True),
    )
}
