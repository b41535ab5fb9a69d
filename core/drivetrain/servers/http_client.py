"""HTTP client of a running engine server: JSON requests and server-sent events.

All waits have a deadline, except those for generated tokens.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DeadlineExceeded, DrivetrainError, EngineDied, EngineInternalError, InvalidConfig

if TYPE_CHECKING:
    import aiohttp
    from pydantic import SecretStr

_MOST_FILES: Final = 65536
_SPARE_FILES: Final = 256
"""File descriptors reserved for the rest of this process."""
_EVENT: Final = b"data: "
_END: Final = b"[DONE]"
_LARGEST_EVENT: Final = 2**30


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Properties of one engine's servers, and the conversion of their errors."""

    engine: str
    """The engine's name, such as ``"SGLang"``."""
    launch: str
    """Launch command, with MODEL in place of the model."""
    port: int
    """Default port."""
    as_engine_error: Callable[[BaseException], DrivetrainError]
    """Converts a refused request (ValueError) or a failure (RuntimeError), each with the server's message."""
    key_statuses: tuple[int, ...] = (401, 403)
    """HTTP statuses for a wrong API key."""
    key_remedy: str = "set endpoint_api_key to its key"


class ServerClient:
    """Connections to one server. Bound to the event loop in which it was opened."""

    def __init__(self, endpoint: str, api_key: SecretStr | None, kind: ServerKind) -> None:
        self.endpoint = endpoint
        self.kind = kind
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._answers: set[aiohttp.ClientResponse] = set()
        """Responses that are being read."""

    async def open(self) -> None:
        """Create the HTTP session."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # Connections are not reused: while this loop is blocked, as in a training step, the server closes idle
            # ones.
            connector=aiohttp.TCPConnector(limit=_connections(), force_close=True),
            # Thousands of connections at once take long to open, so the callers set the timeouts.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        """Close every connection; calls that wait for a response get an error."""
        import aiohttp

        session, self._session = self._session, None
        for answer in self._answers:
            # Closing a connection does not wake its readers.
            answer.content.set_exception(aiohttp.ClientConnectionError("the connection was closed here"))
        if session is not None:
            await session.close()

    async def reach(self) -> None:
        """Open and close a connection; raises OSError if nothing accepts it."""
        parts = urlsplit(self.endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
        await writer.wait_closed()

    async def get(self, path: str, seconds: float | None) -> Any:
        """Return the JSON at ``path``.

        Raises:
            EngineDied: No answer within ``seconds`` (None: no limit), or the connection broke.
            InvalidConfig: The server wants another key.
            EngineError: The server refused or failed.
        """
        return _decoded(*await self._call("GET", path, None, seconds), path)

    async def post(self, path: str, body: object, seconds: float | None) -> Any:
        """Send JSON and return the JSON of the response, None if it has none; raises as :meth:`get` does."""
        return _decoded(*await self._call("POST", path, body, seconds), path)

    async def text(self, path: str, seconds: float | None) -> str:
        """Return the text at ``path``; raises as :meth:`get` does."""
        content, _ = await self._call("GET", path, None, seconds)
        return content.decode(errors="replace")

    async def events(self, path: str, body: object) -> AsyncGenerator[dict[str, Any], None]:
        """Send JSON and yield each server-sent event. Closing the generator early closes the connection."""
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
                    event = _json(line[len(_EVENT) :], path)
                    if "error" in event:
                        # The server may leave a refused stream's connection open.
                        answer.close()
                        raise self._refusal(int(event["error"].get("code") or 500), event, path)
                    yield event
        raise EngineDied(f"the {self.kind.engine} server at {self.endpoint} broke a stream off")

    async def _call(self, method: str, path: str, body: object, seconds: float | None) -> tuple[bytes, str]:
        """Return the response's body and content type."""
        try:
            async with deadline(seconds, path), self._answer(method, path, body) as answer:
                return await answer.read(), answer.content_type
        except (DeadlineExceeded, TimeoutError) as error:
            raise EngineDied(
                f"the {self.kind.engine} server at {self.endpoint} did not answer {method} {path} within {seconds:g} s"
            ) from error

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: object) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        import aiohttp

        if self._session is None:
            raise EngineDied(f"the connection to the {self.kind.engine} server at {self.endpoint} is closed")
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self.endpoint + path, data=data, allow_redirects=False) as answer:
                if answer.status in self.kind.key_statuses:
                    raise InvalidConfig(
                        f"the {self.kind.engine} server at {self.endpoint} refuses {path} (HTTP {answer.status}): "
                        f"{self.kind.key_remedy}",
                        field="endpoint_api_key",
                    )
                if answer.status != 200:
                    raise self._refusal(answer.status, await answer.read(), path)
                self._answers.add(answer)
                try:
                    yield answer
                finally:
                    self._answers.discard(answer)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EngineDied(
                f"the {self.kind.engine} server at {self.endpoint} cannot be reached: {type(error).__name__}: {error}"
            ) from error
        except aiohttp.ClientError as error:
            raise self.kind.as_engine_error(error) from error

    def _refusal(self, status: int, body: bytes | Mapping[str, Any], path: str) -> DrivetrainError:
        return refusal(status, body, path, self.kind)


def refusal(status: int, body: bytes | Mapping[str, Any], path: str, kind: ServerKind) -> DrivetrainError:
    """Convert a server's error response to an exception.

    Args:
        status: HTTP status.
        body: The response's body, raw or decoded.
        path: The requested path.
        kind: The kind of server.
    """
    said = _message(body)
    if status in (400, 422):
        return kind.as_engine_error(ValueError(said))
    return kind.as_engine_error(RuntimeError(f"{path} answered with HTTP {status}: {said}"))


def _message(body: bytes | Mapping[str, Any]) -> str:
    if isinstance(body, bytes):
        try:
            return _message(msgspec.json.decode(body, type=dict[str, Any]))
        except msgspec.DecodeError:
            return body[:500].decode(errors="replace")
    error = body.get("error", body)
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("detail") or error
    return str(error)


def _connections() -> int:
    """Raise this process's limit of open files as far as allowed, and return the number of connections that fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - _SPARE_FILES, 1)


def _decoded(content: bytes, content_type: str, path: str) -> Any:
    return _json(content, path) if content_type == "application/json" else None


def _json(content: bytes, path: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise EngineInternalError(f"{path} answered with what is no JSON: {content[:200]!r}") from error
