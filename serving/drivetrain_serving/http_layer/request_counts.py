"""Counts of answers by route and status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNKNOWN: Final = "unknown"
"""Counts every path without a route: clients choose such paths, and a series for each would grow without bound."""


class RequestCounts:
    """Number of answers that began, by the route's template and the status."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        """(Template of the route, status) → answers."""
        self._fixed: frozenset[str] = frozenset()
        self._templates: Sequence[Route] = ()

    def know(self, routes: Sequence[Route]) -> None:
        """Tell requests apart by these routes from now on."""
        self._fixed = frozenset(route.path for route in routes if not route.param_convertors)
        self._templates = [route for route in routes if route.param_convertors]

    def count(self, path: str, status: int) -> None:
        """Count an answer to a request for ``path``, which is empty if it was refused before its path was known."""
        self.answers[self._route(path), status] += 1

    def by_route(self) -> dict[str, dict[int, int]]:
        """Return route → status → answers."""
        found: dict[str, dict[int, int]] = {}
        for (route, status), number in self.answers.items():
            found.setdefault(route, {})[status] = number
        return found

    def _route(self, path: str) -> str:
        if path in self._fixed:
            return path
        return next((route.path for route in self._templates if route.path_regex.match(path)), UNKNOWN)


class CountsRequests:
    """Middleware that counts each answer when it begins.

    Args:
        app: The application.
        counts: Takes the counts.
    """

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._counts.count(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            if not begun:
                self._counts.count(scope["path"], 500)
            raise
