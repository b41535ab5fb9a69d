"""The process that answers a request: any front-end, the front-end that keeps the session, or the engine's owner."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from drivetrain.errors import EngineStateError
from drivetrain_serving.http_layer.passing_on import pass_on
from drivetrain_serving.vllm.errors import error_answer

ANSWERED_BY_ANY: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/derender",
        "/v1/embeddings",
        "/inference/v1/generate",
        "/skyrl/v1/generate",
        "/generate",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
    }
)
"""Paths that the front-end answers which accepted the connection. The owner answers all others but sessions."""
_SESSION: Final = re.compile(r"/sessions/([^/]+)(?:/(?!v1/models$).*)?")
"""Paths that the front-end answers which keeps the session."""


class Places:
    """The Unix sockets of a server's processes.

    Args:
        folder: Folder of the sockets.
        count: Number of front-ends.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count

    @property
    def owner(self) -> Path:
        """The socket of the engine's owner."""
        return self.folder / "owner.sock"

    def front_end(self, index: int) -> Path:
        """Return the socket of a front-end."""
        return self.folder / f"{index}.sock"

    def keeper(self, session_id: str) -> int:
        """Return the index of the front-end that keeps a session."""
        digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest) % self.count


class PassesOn:
    """Middleware of a front-end's port that passes on the requests that other processes answer.

    It surrounds keys, counts and logs: the process that answers a request also checks, counts and logs it.

    Args:
        app: The application of this front-end.
        places: The processes.
        index: This front-end.
    """

    def __init__(self, app: ASGIApp, places: Places, index: int) -> None:
        self._app = app
        self._places = places
        self._index = index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        place = self._place_of(scope["path"]) if scope["type"] == "http" else None
        if place is None:
            await self._app(scope, receive, send)
            return
        path, unreachable = place
        await pass_on(path, scope, receive, send, unreachable=unreachable)

    def _place_of(self, path: str) -> tuple[Path, Callable[[], Response]] | None:
        """Return the socket of the process that answers, and the answer if it is gone; None: this process answers."""
        if path in ANSWERED_BY_ANY:
            return None
        session = _SESSION.fullmatch(path)
        if session is None:
            return self._places.owner, _no_owner
        keeper = self._places.keeper(session[1])
        return None if keeper == self._index else (self._places.front_end(keeper), _no_keeper)


def _no_owner() -> Response:
    return error_answer(EngineStateError("the process of the engine has ended", state="closed"))


def _no_keeper() -> Response:
    words = "the process that keeps this session has ended and is being started again; its sessions are lost"
    return error_answer(EngineStateError(words, state="starting"))
