"""Sessions: conversations in which each turn builds on an earlier one, named by its request id.

The engine keeps the token ids of each turn and sends the backend whole prompts. The prefix cache makes later turns
cheap, so every backend with a prefix cache has sessions.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass, field
from itertools import chain

from drivetrain.checks.limits import MOST_SESSIONS, MOST_TURNS
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.controller import Controller
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn's own token ids (prompt and answer), and the turn that it builds on.

    Only its own: a conversation of many turns would otherwise take memory in proportion to the square of its length.
    """

    own: array[int]
    before: Turn | None
    parent: str | None

    @property
    def token_ids(self) -> list[int]:
        """The token ids of this turn and of the turns that it builds on."""
        parts: list[array[int]] = []
        turn: Turn | None = self
        while turn is not None:
            parts.append(turn.own)
            turn = turn.before
        return list(chain.from_iterable(reversed(parts)))


@dataclass(slots=True)
class Session:
    """The turns of one session, by request id."""

    session_id: str
    capacity: int
    """Most tokens of a turn together with the turns that it builds on."""
    turns: dict[str, Turn] = field(default_factory=dict)

    def prompt(self, token_ids: list[int], parent: str | None, mode: TurnMode) -> list[int]:
        """Return the whole prompt of a turn whose own part is ``token_ids``.

        Raises:
            InvalidRequest: there is no such earlier turn, the session has the most turns that it may have, or the whole
                prompt exceeds the capacity.
        """
        if len(self.turns) >= MOST_TURNS:
            raise InvalidRequest(
                f"session {self.session_id!r} has {len(self.turns)} turns, the most that a session may have; close it "
                "and open another one",
                field="session_id",
            )
        if parent is None:
            if mode is not TurnMode.CONTINUE:
                raise InvalidRequest(
                    f"turn={mode.value!r} needs the turn that it builds on; give parent_request_id",
                    field="parent_request_id",
                )
            before = []
        elif parent in self.turns:
            before = self.turns[parent].token_ids
        else:
            raise InvalidRequest(
                f"parent_request_id={parent!r}: session {self.session_id!r} has no such turn; it has: "
                f"{', '.join(list(self.turns)[-8:]) or 'none'}",
                field="parent_request_id",
            )
        whole = before + token_ids
        if len(whole) > self.capacity:
            raise InvalidRequest(
                f"the turn and those it builds on have {len(whole)} tokens, more than the session's capacity of "
                f"{self.capacity}; open a session with a larger one",
                field="prompts",
            )
        return whole

    def add(self, completion: Completion, parent: str | None, mode: TurnMode) -> None:
        """Record an answered turn; with ``TurnMode.REPLACE`` the turns after ``parent`` are discarded."""
        if mode is TurnMode.REPLACE and parent is not None:
            self._forget_after(parent)
        token_ids = completion.prompt_token_ids + completion.token_ids
        before = self.turns.get(parent) if parent is not None else None
        begun = before.token_ids if before is not None else []
        if token_ids[: len(begun)] != begun:  # its parent was replaced while it was answered
            before, begun = None, []
        self.turns[completion.request_id] = Turn(array("q", token_ids[len(begun) :]), before, parent)

    def _forget_after(self, parent: str) -> None:
        gone = {parent}
        # A turn is recorded after the one that it builds on, so one pass finds all descendants.
        for request_id, turn in list(self.turns.items()):
            if turn.parent in gone:
                gone.add(request_id)
                del self.turns[request_id]


class Sessions:
    """The open sessions of one engine."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._open: dict[str, Session] = {}

    def open(self, capacity: int, session_id: str | None) -> str:
        """Open a session and return its id, made up if ``session_id`` is None.

        Raises:
            InvalidRequest: a session of this id is open, or as many are open as may be.
        """
        self.controller.require("open_session()", Capability.SESSIONS)
        if len(self._open) >= MOST_SESSIONS:
            raise InvalidRequest(
                f"{len(self._open)} sessions are open, the most that an engine keeps; call close_session() for those "
                "that are done",
                field="session_id",
            )
        session_id = session_id or uuid.uuid4().hex
        if session_id in self._open:
            raise InvalidRequest(f"session_id={shown(session_id)} is open already; close it first", field="session_id")
        self._open[session_id] = Session(session_id, capacity)
        return session_id

    def close(self, session_id: str) -> None:
        """Close a session.

        Raises:
            InvalidRequest: it is not open.
        """
        self.controller.require("close_session()", Capability.SESSIONS)
        self.get(session_id)
        del self._open[session_id]

    def get(self, session_id: str) -> Session:
        """Return an open session.

        Raises:
            InvalidRequest: it is not open.
        """
        if session_id not in self._open:
            raise InvalidRequest(
                f"session_id={shown(session_id)} is not open; open_session() gives one", field="session_id"
            )
        return self._open[session_id]
