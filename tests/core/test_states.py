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
