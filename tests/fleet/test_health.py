"""The health of an engine of a fleet: which transitions there are, and which must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import EngineStateError
from drivetrain_fleet.health import Health, MemberStatus

Step = Callable[[MemberStatus], MemberStatus]

STEPS: dict[str, Step] = {
    "start": lambda status: status.start("v0"),
    "start stale": lambda status: status.start("v9", stale="it joined"),
    "pause": lambda status: status.pause(),
    "resume": lambda status: status.resume(),
    "begin": lambda status: status.begin_update(),
    "commit": lambda status: status.commit("v1"),
    "stale": lambda status: status.stale("left behind"),
    "lag": lambda status: status.lag("it missed one"),
    "relabel": lambda status: status.relabel("v2"),
    "drain": lambda status: status.drain(),
    "fail": lambda status: status.fail("killed"),
}
NAMES = st.lists(st.sampled_from(sorted(STEPS)), max_size=25)


def walk(names: list[str]) -> list[tuple[str, MemberStatus, MemberStatus]]:
    """Take the steps that are not refused; return each with what was before and after it."""
    status, taken = MemberStatus(), []
    for name in names:
        try:
            after = STEPS[name](status)
        except EngineStateError:
            continue
        taken.append((name, status, after))
        status = after
    return taken


@given(NAMES)
def test_stale_is_left_only_by_a_commit(names: list[str]) -> None:
    for name, before, after in walk(names):
        if before.started and not before.synced and after.synced:
            assert name == "commit"
            assert before.updating


@given(NAMES)
def test_nothing_leads_out_of_failed(names: list[str]) -> None:
    failed = False
    for _, before, after in walk(names):
        failed = failed or before.health is Health.FAILED
        assert not failed or after == before


@given(NAMES)
def test_draining_ends_only_with_failure(names: list[str]) -> None:
    for _, before, after in walk(names):
        if before.health is Health.DRAINING:
            assert after.health in (Health.DRAINING, Health.FAILED)


@given(NAMES)
def test_requests_go_only_to_a_synced_or_lagging_engine_that_nothing_holds(names: list[str]) -> None:
    for _, _, after in walk(names):
        clean = after.started and (after.synced or after.behind > 0)
        held = after.updating or after.paused or after.draining or after.failed
        assert after.takes_requests == (clean and not held)
        assert after.takes_requests == (after.health in (Health.READY, Health.LAGGING))
        assert not after.failed or not after.takes_updates


@given(NAMES)
def test_an_update_that_was_begun_ends_in_commit_stale_or_failed(names: list[str]) -> None:
    for name, before, after in walk(names):
        if before.updating and not after.updating:
            assert name in ("commit", "stale", "fail")


@given(NAMES)
def test_an_engine_lags_only_from_weights_that_may_be_served(names: list[str]) -> None:
    for name, before, after in walk(names):
        assert not (after.synced and after.behind)
        if after.behind > before.behind:
            assert name == "lag"
            assert before.servable
            assert not before.updating
            assert after.behind == before.behind + 1


@given(NAMES)
def test_the_version_changes_only_by_start_commit_and_relabel(names: list[str]) -> None:
    for name, before, after in walk(names):
        if before.version != after.version:
            assert name in ("start", "start stale", "commit", "relabel")


def test_every_health_can_be_reached_and_says_why() -> None:
    ready = MemberStatus().start("v0")
    reached = {
        MemberStatus().health,
        ready.health,
        ready.pause().health,
        ready.begin_update().health,
        ready.stale("why").health,
        ready.lag("why").health,
        ready.drain().health,
        ready.fail("why").health,
    }
    assert reached == set(Health)
    assert ready.lag("late").pause().health is Health.PAUSED
    assert ready.lag("late").begin_update().commit("v1").health is Health.READY
    assert ready.stale("no commit").describe() == "stale (no commit)"
    assert ready.fail("killed").fail("again").describe() == "failed (killed)"
    assert ready.pause().begin_update().commit("v1").health is Health.PAUSED


@pytest.mark.parametrize("step", sorted(set(STEPS) - {"start", "start stale", "fail"}))
def test_an_engine_that_has_not_started_refuses(step: str) -> None:
    with pytest.raises(EngineStateError, match="starting"):
        STEPS[step](MemberStatus())
