"""Sessions: the turns of a conversation, of which each builds on an earlier one, by that one's request id.

The engine page keeps the token ids of each turn and gives the backend whole prompts. That later turns are cheap is the
prefix cache's doing, so any backend that has one has sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.errors import InvalidRequest
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import Completion


@dataclass(slots=True)
class Turn:
    """What the model saw and said, and the turn before."""

    token_ids: list[int]
    parent: str | None


@dataclass(slots=True)
class Session:
    """The turns of one session, by request id."""

    session_id: str
    capacity: int
    """Most tokens of one turn, with all that it builds on."""
    turns: dict[str, Turn] = field(default_factory=dict)

    def prompt(self, token_ids: list[int], parent: str | None, mode: TurnMode) -> list[int]:
        """Return what the model sees of a turn whose own prompt is ``token_ids``.

        Raises:
            InvalidRequest: there is no such earlier turn, or the capacity does not hold both.
        """
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
                f"the turn has {len(whole)} tokens with all that it builds on, more than the session's capacity of "
                f"{self.capacity}; open a session with a larger one",
                field="prompts",
            )
        return whole

    def add(self, completion: Completion, parent: str | None, mode: TurnMode) -> None:
        """Note a turn that was answered; what it replaces is gone."""
        if mode is TurnMode.REPLACE and parent is not None:
            self._forget_after(parent)
        token_ids = completion.prompt_token_ids + completion.token_ids
        self.turns[completion.request_id] = Turn(token_ids, parent)

    def _forget_after(self, parent: str) -> None:
        gone = {parent}
        # A turn is noted after the one that it builds on.
        for request_id, turn in list(self.turns.items()):
            if turn.parent in gone:
                gone.add(request_id)
                del self.turns[request_id]
