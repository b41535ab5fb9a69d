"""The garbage collector of processes that are drivetrain's alone."""

from __future__ import annotations

import gc

from drivetrain.process.garbage_collection import steady_garbage_collection

REQUESTS = 100_000


class _Pass:
    """Counts passes over all objects that are not frozen."""

    def __init__(self) -> None:
        self.full = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        self.full += phase == "stop" and info["generation"] == 2


def full_passes() -> int:
    """Make objects as requests in flight do, and return how many full passes that took."""
    gc.collect()  # Python compares with what the last full pass found, frozen or not
    counted = _Pass()
    gc.callbacks.append(counted)
    try:
        lasting = [[index] for index in range(REQUESTS)]
    finally:
        gc.callbacks.remove(counted)
    assert len(lasting) == REQUESTS
    return counted.full


def test_requests_in_flight_are_not_looked_at_again_and_again() -> None:
    before = gc.get_threshold()
    with steady_garbage_collection(holds_model=False):
        assert full_passes() == 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_where_a_models_tensors_are_the_thresholds_are_pythons_own() -> None:
    before = gc.get_threshold()
    with steady_garbage_collection(holds_model=True):
        assert full_passes() > 0
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
