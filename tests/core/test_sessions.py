"""Sessions: the model's view of a turn, and the turns that can be continued."""

from __future__ import annotations

import gc
import tracemalloc
from unittest.mock import Mock

import pytest

from drivetrain import Completion, FinishReason, InvalidRequest, TurnMode
from drivetrain.checks.limits import MOST_SESSIONS, MOST_TURNS
from drivetrain.engine.sessions import Session, Sessions


def answered(session: Session, name: str, prompt: list[int], parent: str | None, mode: TurnMode) -> None:
    whole = session.prompt(prompt, parent, mode)
    session.add(Completion(name, 0, 0, whole, [100], "", FinishReason.LENGTH), parent, mode)


def test_a_turn_sees_all_before_it() -> None:
    session = Session("s", 100)
    answered(session, "a", [1, 2], None, TurnMode.CONTINUE)
    answered(session, "b", [3], "a", TurnMode.CONTINUE)
    assert session.prompt([4], "b", TurnMode.BRANCH) == [1, 2, 100, 3, 100, 4]
    assert session.prompt([4], None, TurnMode.CONTINUE) == [4]


def test_replacing_forgets_all_that_followed() -> None:
    session = Session("s", 100)
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "a")):
        answered(session, name, [1], parent, TurnMode.CONTINUE)
    answered(session, "e", [9], "a", TurnMode.REPLACE)
    assert set(session.turns) == {"a", "e"}
    with pytest.raises(InvalidRequest, match="no such turn"):
        session.prompt([1], "c", TurnMode.CONTINUE)


def test_what_cannot_be_is_refused() -> None:
    session = Session("s", 4)
    with pytest.raises(InvalidRequest, match="parent_request_id"):
        session.prompt([1], None, TurnMode.REPLACE)
    with pytest.raises(InvalidRequest, match="capacity of 4"):
        session.prompt([1] * 5, None, TurnMode.CONTINUE)


def test_a_turn_survives_the_one_that_it_builds_on() -> None:
    """Two turns build on the first one at once, and one of them replaces what follows before the other is answered."""
    session = Session("s", 100)
    answered(session, "a", [1], None, TurnMode.CONTINUE)
    answered(session, "b", [2], "a", TurnMode.CONTINUE)
    late = session.prompt([3], "b", TurnMode.CONTINUE)
    answered(session, "c", [4], "a", TurnMode.REPLACE)
    session.add(Completion("d", 0, 0, late, [100], "", FinishReason.LENGTH), "b", TurnMode.CONTINUE)
    assert session.prompt([5], "d", TurnMode.CONTINUE) == [*late, 100, 5]


def test_a_long_conversation_takes_memory_in_proportion_to_its_length() -> None:
    session, turns, tokens = Session("s", 1 << 20), 400, 20
    tracemalloc.start()
    try:
        for turn in range(turns):
            answered(session, str(turn), list(range(tokens - 1)), str(turn - 1) if turn else None, TurnMode.CONTINUE)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(session.prompt([], str(turns - 1), TurnMode.CONTINUE)) == turns * tokens
    assert held < turns * (1024 + 16 * tokens), f"{held} bytes for {turns} turns of {tokens} tokens"


def test_sessions_that_nobody_closes_are_bounded() -> None:
    sessions = Sessions(Mock())
    opened = [sessions.open(8, None) for _ in range(MOST_SESSIONS)]
    with pytest.raises(InvalidRequest, match="close_session"):
        sessions.open(8, None)
    sessions.close(opened[0])
    sessions.open(8, None)


def test_turns_of_one_session_are_bounded() -> None:
    session = Session("s", 100)
    for turn in range(MOST_TURNS):
        answered(session, str(turn), [1], None, TurnMode.CONTINUE)
    with pytest.raises(InvalidRequest, match="open another one"):
        session.prompt([1], None, TurnMode.CONTINUE)
