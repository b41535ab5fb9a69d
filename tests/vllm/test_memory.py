"""What of an allocation lies beside keys and values."""

from __future__ import annotations

import pytest

from drivetrain_vllm.inside.memory import gaps


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([], [(100, 200)]),
        ([(100, 200)], []),
        ([(100, 180)], [(180, 200)]),
        ([(150, 160), (110, 120)], [(100, 110), (120, 150), (160, 200)]),
        ([(120, 150), (130, 140)], [(100, 120), (150, 200)]),
        ([(0, 100), (200, 300)], [(100, 200)]),
        ([(50, 120), (190, 250)], [(120, 190)]),
    ],
)
def test_gaps_are_what_no_storage_covers(held: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
    assert gaps(100, 200, held) == found
