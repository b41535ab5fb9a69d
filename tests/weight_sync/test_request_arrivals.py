"""Track which requests have reached an engine."""

from __future__ import annotations

from drivetrain_weight_sync.receiver.request_arrivals import Arrivals, request_id


def named(*numbers: int) -> list[str]:
    return [request_id("a1b2", number) for number in numbers]


def test_what_came_is_known_and_nothing_else() -> None:
    arrivals = Arrivals()
    came = {0, 1, 7, 8, 63, 5000}
    for name in named(*came):
        arrivals.note(name)
    assert {number for number in range(6000) if request_id("a1b2", number) in arrivals} == came


def test_names_that_no_backend_gave_are_left_out() -> None:
    arrivals = Arrivals()
    for name in ("HEALTH_CHECK_1.5", "warm-up", "a1b2-7", "", "a1b2-x."):
        arrivals.note(name)
        assert name not in arrivals
    assert named(7)[0] not in arrivals


def test_what_is_neither_live_nor_there_yet_is_complete() -> None:
    arrivals = Arrivals()
    live, complete, on_its_way = named(1, 2, 3)
    for name in (live, complete):
        arrivals.note(name)
    assert arrivals.tokens([live, complete, on_its_way], {live: 12}) == {live: 12, on_its_way: 0}


def test_no_name_is_the_beginning_of_another() -> None:
    names = named(*range(1200))
    assert not [one for one in names if sum(other.startswith(one) for other in names) > 1]
