"""Sessions: the model's view of a turn, and the turns that can be continued."""

from __future__ import annotations

import pytest

from drivetrain import Completion, FinishReason, InvalidRequest, TurnMode
from drivetrain.engine.sessions import Session


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
