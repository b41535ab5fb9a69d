"""Request targets with a scheme and host, which clients of proxies send. Servers must take them (RFC 9112, 3.2.2)."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_AUTHORITY: Final = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class TakesAbsoluteTargets:
    """Middleware: ``http://host/path`` is a request for ``/path``, with that host in the place of the header's.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and (found := _AUTHORITY.match(scope["raw_path"])):
            raw_path = scope["raw_path"][found.end() :] or b"/"
            headers = [(b"host", found[1]), *(one for one in scope["headers"] if one[0] != b"host")]
            scope = {**scope, "raw_path": raw_path, "path": unquote(raw_path.decode("ascii")), "headers": headers}
        await self._app(scope, receive, send)
