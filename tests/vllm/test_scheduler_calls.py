"""The engine core schedules nothing while requests are frozen or memory sleeps."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from drivetrain.types.modes import MemoryTag
from drivetrain_vllm.in_engine.scheduler_calls import Core

KV_CACHE, WEIGHTS = frozenset({MemoryTag.KV_CACHE}), frozenset({MemoryTag.WEIGHTS})


class Scheduler:
    """A scheduler with a request that waits."""

    def __init__(self) -> None:
        self.running: list[object] = []
        self.state = "UNPAUSED"

    def set_pause_state(self, state: str) -> None:
        self.state = state


class OfScheduler(Core):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(SimpleNamespace(scheduler=scheduler, batch_queue=None))
        self.fails = False

    def _of_workers(self, method: str, *arguments: object) -> object:
        if self.fails:
            raise MemoryError(method)
        return None

    def reset_prefix_cache(self) -> None:
        pass


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    states = SimpleNamespace(PAUSED_ALL="PAUSED_ALL", UNPAUSED="UNPAUSED")
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.interface", SimpleNamespace(PauseState=states))
    return Scheduler()


def test_the_scheduler_is_held_until_all_memory_is_awake(scheduler: Scheduler) -> None:
    core, states = OfScheduler(scheduler), []
    for change, tags in ((core.sleep, KV_CACHE), (core.sleep, WEIGHTS), (core.wake_up, KV_CACHE)):
        change(tags)
        states.append(scheduler.state)
    core.fails = True
    with pytest.raises(MemoryError):
        core.wake_up(WEIGHTS)
    states.append(scheduler.state)
    assert states == ["PAUSED_ALL"] * 4
    core.fails = False
    core.wake_up(WEIGHTS)
    assert scheduler.state == "UNPAUSED"


def test_requests_stay_frozen_when_memory_wakes_up(scheduler: Scheduler) -> None:
    core = OfScheduler(scheduler)
    core.sleep(KV_CACHE)
    core.is_frozen = True
    core.wake_up(KV_CACHE)
    assert scheduler.state == "PAUSED_ALL"


def test_memory_that_did_not_fall_asleep_holds_nothing(scheduler: Scheduler) -> None:
    core = OfScheduler(scheduler)
    core.fails = True
    with pytest.raises(MemoryError):
        core.sleep(KV_CACHE)
    assert scheduler.state == "UNPAUSED"
