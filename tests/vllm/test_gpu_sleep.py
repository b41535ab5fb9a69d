"""Find the parts of an allocation that hold no keys or values."""

from __future__ import annotations

import pytest

from drivetrain_vllm.in_engine.gpu_sleep import gaps, used


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


def test_what_torch_has_given_away_of_some_segments_is_used() -> None:
    def block(size: int, requested: int, state: str) -> dict[str, object]:
        return {"size": size, "requested_size": requested, "state": state}

    mixed = [
        block(512, 400, "active_allocated"),
        block(512, 0, "inactive"),
        block(1024, 1000, "active_pending_free"),
    ]
    segments = [
        {"address": 10_000, "blocks": mixed},
        {"address": 20_000, "blocks": mixed},
        {"address": 30_000, "blocks": [block(2048, 2048, "inactive")]},
    ]
    assert used(segments, [(10_000, 12_048), (30_000, 32_048)]) == [(10_000, 10_400), (11_024, 12_024)]
    assert used(segments, []) == []
