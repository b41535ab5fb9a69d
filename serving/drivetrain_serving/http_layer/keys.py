"""Keys of the routes: middleware that checks them."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from drivetrain.checks.safe_repr import shown
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.host_names import host_in


class Keys:
    """Middleware that lets a request pass if it brings the route's key.

    A key comes as ``Authorization: Bearer KEY`` or, from Anthropic's clients, as ``x-api-key: KEY``. A route without a
    key refuses what a page of another site asks for in a browser: any page that the user opens could change the weights
    of a server on the same machine. A page cannot send a key without the server's consent, which is never given. Such a
    route also refuses hosts that the configuration does not allow: a page may have given its name this machine's
    address.

    Args:
        app: The application.
        config: The keys.
        open_paths: Paths that need no key.
        data_paths: Paths that the API key opens. All others are control routes.
        unauthorized: Makes the answer to a request without the key.
        forbidden: Makes the answer to a request of another site's page, or for another host; takes the reason.
        data_pattern: A pattern of further paths that the API key opens.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        open_paths: Collection[str],
        data_paths: Collection[str],
        unauthorized: Callable[[], Response],
        forbidden: Callable[[str], Response],
        data_pattern: re.Pattern[str],
    ) -> None:
        self._app = app
        self._open = frozenset(open_paths)
        self._data = frozenset(data_paths)
        self._unauthorized = unauthorized
        self._forbidden = forbidden
        self._pattern = data_pattern
        self._hosts = config.hosts
        control = [key for key in (config.control_key,) if key is not None]
        self._control_keys = control or [key for key in (config.api_key,) if key and not config.open_control]
        self._data_keys = [config.api_key, *control] if config.api_key is not None else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        refusal = None if scope["type"] != "http" else self._refusal(scope["path"], Headers(scope=scope))
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        if path in self._open:
            return None
        keys = self._data_keys if path in self._data or self._pattern.fullmatch(path) else self._control_keys
        if not keys:
            return self._without_key(headers)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
        return None if any(found) else self._unauthorized()

    def _without_key(self, headers: Headers) -> Response | None:
        """Return the refusal of a request that needs no key, if a page of another site may have made it."""
        if _is_of_another_site(headers):
            return self._forbidden("a page of another site asked; give the server an api_key")
        # Every browser sends Host; clients of HTTP/1.0 need not.
        refused = [] if self._hosts is None else [one for one in headers.getlist("host") if not self._hosts.allow(one)]
        if refused:
            option = host_in(refused[0]) or "NAME"
            return self._forbidden(
                f"Host is {shown(refused[0])}, and without keys this server answers to localhost, loopback addresses "
                f"and allowed_hosts only; start it with --allowed-host {option}, or with an api_key"
            )
        return None


def _is_of_another_site(headers: Headers) -> bool:
    """Return whether a browser made the request for a page that this server did not send."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")
