"""Sessions: conversations whose turns build on each other."""

from __future__ import annotations

from drivetrain.engine.api.page import Page
from drivetrain.types.arguments import checked


class SessionCalls(Page):
    """Open and close sessions; ``generate_with_session`` adds turns."""

    @checked
    async def open_session(self, capacity: int, *, session_id: str | None = None) -> str:
        """Open a session and return its id.

        Args:
            capacity: Most tokens of a turn together with the turns that it builds on.
            session_id: The id to use; made up if not given.

        Raises:
            InvalidRequest: a session of this id is open.
        """
        return self.parts.sessions.open(capacity, session_id)

    @checked
    async def close_session(self, session_id: str) -> None:
        """Close a session; turns that name it afterwards are refused.

        Raises:
            InvalidRequest: it is not open.
        """
        self.parts.sessions.close(session_id)
