"""Properties of a live engine, checked with random values by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings

Test = Callable[..., Any]


def random_property(examples: int, seeded_by: int) -> Callable[[Test], Test]:
    """Configure a test that ``given`` made: no deadline, no database, and one failure reported, shrunk.

    Args:
        examples: Number of values for which the property is checked.
        seeded_by: Seed of the values.
    """
    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        phases=(Phase.generate, Phase.shrink),
    )
    return lambda test: seed(seeded_by)(chosen(test))
