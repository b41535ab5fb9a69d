"""HTTP to a running SGLang server: JSON there and back, and events. Every wait is bounded but those for tokens."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from drivetrain.errors import EngineDied, EngineInternalError, InvalidConfig
from drivetrain_sglang.errors import as_engine_error, from_http

if TYPE_CHECKING:
    import aiohttp
    from pydantic import SecretStr

_MOST_FILES: Final = 65536
_SPARE_FILES: Final = 256
"""Files that the rest of this process opens."""
_KEEP_S: Final = 2.0
"""How long an idle connection is kept: less than SGLang does, which closes it while a request may be on its way."""
_EVENT: Final = b"data: "
_END: Final = b"[DONE]"
_LARGEST_EVENT: Final = 2**30


class ServerClient:
    """Connections to one server. Belongs to the event loop that it was opened in."""

    def __init__(self, endpoint: str, api_key: SecretStr | None) -> None:
        self.endpoint = endpoint
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._answers: set[aiohttp.ClientResponse] = set()
        """Those that are being read."""

    async def open(self) -> None:
        """Make ready to connect."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=_connections(), keepalive_timeout=_KEEP_S),
            # Thousands of connections at once take their time; whoever calls says how long it waits.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        """End every connection; what waits for an answer gets an error."""
        import aiohttp

        session, self._session = self._session, None
        for answer in self._answers:
            # Closing a connection wakes nobody who reads from it.
            answer.content.set_exception(aiohttp.ClientConnectionError("the connection was closed here"))
        if session is not None:
            await session.close()

    async def reach(self) -> None:
        """Connect and say nothing; raises OSError where nobody takes connections."""
        parts = urlsplit(self.endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
        await writer.wait_closed()

    async def get(self, path: str, seconds: float | None) -> Any:
        """Return the JSON at ``path``.

        Raises:
            EngineDied: nobody answers within ``seconds`` (None: some time), or the connection broke.
            InvalidConfig: the server wants another key.
            EngineError: it refuses.
        """
        return await self._call("GET", path, None, seconds)

    async def post(self, path: str, body: object, seconds: float | None) -> Any:
        """Send JSON and return the answer's, or None where there is none; raises as :meth:`get` does."""
        return await self._call("POST", path, body, seconds)

    async def events(self, path: str, body: object) -> AsyncGenerator[dict[str, Any], None]:
        """Send JSON and yield each server-sent event; closing early closes the connection."""
        async with self._answer("POST", path, body) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > _LARGEST_EVENT:
                    raise EngineInternalError(f"{path} of {self.endpoint} sent an event of more than 1 GiB")
                for line in lines:
                    if not line.startswith(_EVENT):
                        continue
                    if line[len(_EVENT) :].strip() == _END:
                        return
                    event = _decoded(line[len(_EVENT) :], path)
                    if "error" in event:
                        # SGLang breaks the connection of a stream that it refuses.
                        answer.close()
                        raise from_http(int(event["error"].get("code") or 500), event, path)
                    yield event
        raise EngineDied(f"the SGLang server at {self.endpoint} broke a stream off")

    async def _call(self, method: str, path: str, body: object, seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await self._json(method, path, body)
        except TimeoutError as error:
            raise EngineDied(
                f"the SGLang server at {self.endpoint} did not answer {method} {path} within {seconds:g} s"
            ) from error

    async def _json(self, method: str, path: str, body: object) -> Any:
        async with self._answer(method, path, body) as answer:
            content = await answer.read()
            return _decoded(content, path) if answer.content_type == "application/json" else None

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: object) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        import aiohttp

        if self._session is None:
            raise EngineDied(f"the connection to the SGLang server at {self.endpoint} is closed")
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self.endpoint + path, data=data, allow_redirects=False) as answer:
                if answer.status in (401, 403):
                    raise InvalidConfig(
                        f"the SGLang server at {self.endpoint} refuses {path} (HTTP {answer.status}): set "
                        "endpoint_api_key to its key; if it was started with --admin-api-key, it must have no other "
                        "--api-key beside it",
                        field="endpoint_api_key",
                    )
                if answer.status != 200:
                    raise from_http(answer.status, await answer.read(), path)
                self._answers.add(answer)
                try:
                    yield answer
                finally:
                    self._answers.discard(answer)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EngineDied(
                f"the SGLang server at {self.endpoint} cannot be reached: {type(error).__name__}: {error}"
            ) from error
        except aiohttp.ClientError as error:
            raise as_engine_error(error) from error


def _connections() -> int:
    """How many connections this process may have, after it is allowed as many files as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - _SPARE_FILES, 1)


def _decoded(content: bytes, path: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise EngineInternalError(f"{path} answered with what is no JSON: {content[:200]!r}") from error
