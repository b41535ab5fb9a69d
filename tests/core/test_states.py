"""The state that a refusal names."""

from __future__ import annotations

import pytest

from drivetrain import EngineStateError, MemoryTag
from drivetrain.engine.states import EngineStatus

ASLEEP = EngineStatus().start().started().sleep(frozenset({MemoryTag.KV_CACHE}), keeps_weights=True)


@pytest.mark.parametrize("status", [ASLEEP, ASLEEP.begin_update()], ids=["idle", "during an update"])
def test_a_request_is_refused_by_the_sleep_and_not_by_an_update(status: EngineStatus) -> None:
    with pytest.raises(EngineStateError, match=r"the engine is asleep \(kv_cache\); wake it up first") as caught:
        status.require_admission("generate()")
    assert caught.value.state == "asleep"


def test_weights_that_are_lost_in_sleep_are_named_beside_it() -> None:
    status = ASLEEP.sleep(frozenset({MemoryTag.WEIGHTS}), keeps_weights=False)
    with pytest.raises(EngineStateError, match=r"asleep \(kv_cache, weights\), weights dirty"):
        status.require_admission("generate()")


CACHE, WEIGHTS = frozenset({MemoryTag.KV_CACHE}), frozenset({MemoryTag.WEIGHTS})
LEFT = ASLEEP.leave_asleep(CACHE, "the first holder")


def test_memory_that_another_holder_puts_to_sleep_again_is_left_by_nobody() -> None:
    assert LEFT.describe() == "asleep (kv_cache), left so by the first holder, which is gone"
    assert LEFT.sleep(CACHE, keeps_weights=True) == ASLEEP


def test_a_sleep_or_wake_up_of_other_memory_does_not_forget_who_left_the_engine_asleep() -> None:
    more = LEFT.sleep(WEIGHTS, keeps_weights=True)
    assert more.describe() == "asleep (kv_cache, weights), kv_cache left so by the first holder, which is gone"
    assert more.wake(WEIGHTS) == LEFT
    assert more.wake(CACHE).describe() == "asleep (weights)"


def test_each_holder_that_left_memory_asleep_is_named() -> None:
    status = LEFT.sleep(WEIGHTS, keeps_weights=True).leave_asleep(WEIGHTS, "the second holder")
    assert status.describe() == (
        "asleep (kv_cache, weights), kv_cache left so by the first holder, which is gone, "
        "weights left so by the second holder, which is gone"
    )
    assert status.wake(CACHE | WEIGHTS).describe() == "ready"
