"""All sessions of a server: made when first used, bounded in number, and gone after a time without use."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain_serving.config import SessionConfig
from drivetrain_serving.gateway.errors import GatewayFull, SessionBusy, SessionFull, SessionNotFound
from drivetrain_serving.gateway.records import RecordStore
from drivetrain_serving.gateway.session_turns import Session

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SWEEPS: Final = 4
"""Number of looks for expired sessions within the time after which one expires."""


class Sessions:
    """The sessions of a server.

    Args:
        config: Bounds.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._sessions: dict[str, Session] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.records = RecordStore(config.memory_bytes, config.disk_bytes, config.folder)

    def all(self) -> list[Session]:
        """Return the sessions, the oldest first."""
        return list(self._sessions.values())

    @contextmanager
    def used(self, session_id: str) -> Generator[Session]:
        """Use a session, so that it neither expires nor is deleted.

        Raises:
            SessionNotFound: There is none of that id.
        """
        session = self._found(session_id)
        self.begin(session)
        try:
            yield session
        finally:
            self.end(session)

    def begin(self, session: Session, turns: int = 0) -> None:
        """Count a use of a session that may add ``turns``; :meth:`end` ends it."""
        session.in_flight += 1
        session.turns_in_flight += turns

    def end(self, session: Session, turns: int = 0) -> None:
        """End a use of a session."""
        session.in_flight -= 1
        session.turns_in_flight -= turns
        session.last_used = time.monotonic()

    def for_turns(self, session_id: str, turns: int) -> Session:
        """Return a session that may get so many turns; if there is none of that id, a new one, for :meth:`keep`.

        Raises:
            InvalidRequest: The id is none.
            SessionFull: The session has its maximum number of turns.
            GatewayFull: There are too many sessions, or there is no room for the turn.
        """
        if not _ID.fullmatch(session_id):
            raise InvalidRequest(
                f"the session id {shown(session_id)} is not allowed; use at most 128 letters, digits and . _ : - and "
                "begin with a letter or digit",
                field="session_id",
            )
        if self.records.is_full:
            disk = self.records.not_written or f"{self._config.disk_bytes} bytes of disk are full"
            raise GatewayFull(
                f"the sessions' tokens fill {self._config.memory_bytes} bytes of memory, and {disk}; read and delete "
                "sessions, or raise the bounds"
            )
        session = self._sessions.get(session_id)
        if session is None:
            self._require_room()
            session = Session(session_id)
        if len(session.turns) + session.turns_in_flight + turns > self._config.most_turns:
            raise SessionFull(
                f"the session {session_id} has {len(session.turns)} turns and {session.turns_in_flight} in flight, and "
                f"the request makes {turns}; at most {self._config.most_turns} turns are kept"
            )
        return session

    def keep(self, session: Session) -> Session:
        """Keep a session once a request of it goes to the engine; return the one of its id that is kept.

        Raises:
            GatewayFull: There are too many sessions.
        """
        if session.id not in self._sessions:
            self._require_room()
            self._sessions[session.id] = session
            self._plan_sweep()
        return self._sessions[session.id]

    def _require_room(self) -> None:
        if len(self._sessions) >= self._config.most_sessions:
            raise GatewayFull(
                f"there are {len(self._sessions)} sessions, as many as allowed; delete some, or raise most_sessions"
            )

    async def delete(self, session_id: str) -> None:
        """Delete a session.

        Raises:
            SessionNotFound: There is none of that id.
            SessionBusy: Requests of it are in flight.
        """
        session = self._found(session_id)
        if session.in_flight:
            raise SessionBusy(f"{session.in_flight} requests of the session {session_id} are in flight; end them first")
        await self._drop(session)

    def _found(self, session_id: str) -> Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionNotFound(
                f"there is no session {shown(session_id)}; it expired, was deleted, or no request has named it"
            ) from None

    async def _drop(self, session: Session) -> None:
        if self._sessions.get(session.id) is not session:
            return
        del self._sessions[session.id]
        self.records.forget([turn.record for turn in session.turns])
        await asyncio.to_thread(self.records.delete, session.file)

    # Expiry ------------------------------------------------------------------------------------------------------

    def _plan_sweep(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._config.timeout / _SWEEPS, self._begin_sweep)

    def _begin_sweep(self) -> None:
        task = asyncio.ensure_future(self._expire())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire(self) -> None:
        now = time.monotonic()
        for session in self.all():
            if not session.in_flight and now - session.last_used > self._config.timeout:
                await self._drop(session)
        self._sweep = None
        if self._sessions:
            self._plan_sweep()

    async def close(self) -> None:
        """Forget all sessions and delete their files."""
        if self._sweep is not None:
            self._sweep.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sessions.clear()
        await asyncio.to_thread(self.records.close)
