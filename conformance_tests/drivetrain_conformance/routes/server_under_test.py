"""The server under test: its address, its dialect, and requests to it that all have a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx

from drivetrain.errors import InvalidConfig
from drivetrain_conformance.routes.dialect import Dialect
from drivetrain_conformance.routes.server_answers import Answer, Field, parsed

if TYPE_CHECKING:
    from drivetrain_conformance.routes.material import Material

_OWNERS: Final = {"vllm": Dialect.VLLM, "sglang": Dialect.SGLANG}
_DATA: Final = ("/v1/completions", "/v1/chat", "/v1/models", "/inference/", "/generate", "/tokenize", "/detokenize")
"""Beginnings of the paths that the key of requests opens; other paths get the control key."""
_NOT_OFFERED: Final = (403, 404, 405, 501)
_UNKNOWN_CONTEXT: Final = 1024
_LONGEST: Final = 4096
_WAITS_S: Final = 0.5


class RouteRefused(Exception):
    """The server does not offer a route, or refuses the request as not supported."""


class CannotRun(Exception):
    """A case could not be brought about: a key is missing, or the server was too fast."""


@dataclass(frozen=True, slots=True)
class Access:
    """Address and keys of the server under test."""

    url: str
    """Address of the server, with or without ``/v1``."""
    dialect: Dialect | None = None
    """The routes to expect; by default those of the owner that the model's card names."""
    timeout: float = 60.0
    """Deadline of each request, in seconds."""
    api_key: str = ""
    """Bearer key of requests; empty for none."""
    control_key: str = ""
    """Bearer key of control routes; empty for :attr:`api_key`."""
    material: Material | None = None
    """Checkpoints and adapters to load, if the model's folder is known."""


class Stream:
    """Events of one streamed answer."""

    def __init__(self, response: httpx.Response, asked: str, deadline: float) -> None:
        self._lines = _lines(response)
        self._asked = asked
        self._deadline = deadline
        self.is_done = False
        """``[DONE]`` has come."""

    async def next(self) -> Field | None:
        """Return the next event; None at the end."""
        while (line := await self._line()) is not None:
            if not line:
                continue
            assert line.startswith("data:"), f"{self._asked}: a line of the stream is {line[:200]!r}"
            assert not self.is_done, f"{self._asked}: after [DONE] came {line[:200]!r}"
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                self.is_done = True
                continue
            event = parsed(data, f"an event of {self._asked}")
            assert "error" not in event.mapping(), f"{self._asked}: the stream ends in {event.shown}"
            return event
        return None

    async def _line(self) -> str | None:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(self._lines, None)
        except TimeoutError:
            raise AssertionError(f"{self._asked} did not end before its deadline") from None

    async def rest(self) -> list[Field]:
        """Return all further events."""
        events: list[Field] = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield an answer's lines; unlike httpx's own, they end at line feeds alone, not at U+2028 or U+0085 in a text."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode().removesuffix("\r")
    if rest:
        yield rest.decode()


class Target:
    """A running server.

    Args:
        client: Client of the server's address.
        access: The server's address and keys.
        dialect: The routes to expect.
        card: Its first model, as ``/v1/models`` describes it.
    """

    def __init__(self, client: httpx.AsyncClient, access: Access, dialect: Dialect, card: Field) -> None:
        self._client = client
        self._access = access
        self.dialect = dialect
        self.model = card["id"].text()
        context = card.mapping().get("max_model_len")
        self.context = context if isinstance(context, int) else None
        """The context length that the model's card states, in tokens; None if it states none."""

    @property
    def material(self) -> Material:
        """Checkpoints and adapters to load.

        Raises:
            CannotRun: the model's folder was not given.
        """
        if self._access.material is None:
            raise CannotRun("the served model's folder is not known: give --model")
        return self._access.material

    @property
    def long(self) -> int:
        """As many new tokens as a short prompt's request may ask for, up to 4096."""
        return max(1, min((self.context or _UNKNOWN_CONTEXT) - 32, _LONGEST))

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | str | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request and return its answer, with any status."""
        asked = f"{method} {path}"
        try:
            async with asyncio.timeout(self._access.timeout):
                response = await self._client.send(self._request(method, path, body, query, headers))
        except (TimeoutError, httpx.TimeoutException):
            raise AssertionError(f"{asked} did not answer within {self._access.timeout:g} s") from None
        answer = Answer(asked, response.status_code, dict(response.headers), response.content)
        if answer.status == 401:
            raise CannotRun(f"{asked} wants a key: give --api-key or --control-key")
        return answer

    async def get(self, path: str, **query: str) -> Answer:
        """Return the answer of status 200 to a GET."""
        return ok(await self.ask("GET", path, query=query))

    async def post(self, path: str, body: Mapping[str, object] | None = None, **query: str) -> Answer:
        """Return the answer of status 200 to a POST."""
        return ok(await self.ask("POST", path, body, query))

    async def refused(
        self, path: str, body: Mapping[str, object] | str | None = None, query: Mapping[str, str] | None = None
    ) -> Answer:
        """Return the answer to a wrong POST, which must be a client's error other than "not offered"."""
        answer = await self.ask("POST", path, body, query)
        _require_offered(answer)
        assert 400 <= answer.status < 500, f"{answer.asked}: a wrong request got {answer.shown}; expected 4xx"
        return answer

    @asynccontextmanager
    async def streaming(self, path: str, body: Mapping[str, object]) -> AsyncIterator[Stream]:
        """Send a request whose answer is streamed."""
        deadline = asyncio.get_running_loop().time() + self._access.timeout
        request = self._request("POST", path, {**body, "stream": True}, None)
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._client.send(request, stream=True)
        except (TimeoutError, httpx.TimeoutException):
            raise AssertionError(f"POST {path} did not answer within {self._access.timeout:g} s") from None
        try:
            if response.status_code != 200:
                async with asyncio.timeout_at(deadline):
                    content = await response.aread()
                ok(Answer(f"POST {path}", response.status_code, dict(response.headers), content))
            yield Stream(response, f"POST {path}", deadline)
        finally:
            await response.aclose()

    async def interrupted(
        self, path: str, body: Mapping[str, object], interrupt: Callable[[], Awaitable[object]]
    ) -> list[Field]:
        """Interrupt a streamed request after its first event; return all events, the last one included."""
        async with self.streaming(path, body) as stream:
            begun = await stream.next()
            assert begun is not None, f"the stream of POST {path} is empty"
            await interrupt()
            return [begun, *await stream.rest()]

    async def meanwhile(
        self, path: str, body: Mapping[str, object], ask: Callable[[], Awaitable[Answer]]
    ) -> list[Field]:
        """Ask something after a streamed request's first event; return all events.

        The server may answer once the request has ended, and must answer 200.
        """
        asking: list[asyncio.Future[Answer]] = []

        async def begin() -> None:
            asking.append(asyncio.ensure_future(ask()))

        events = await self.interrupted(path, body, begin)
        (await asking[0]).require(200)
        return events

    async def requires_waiting(
        self, asking: Callable[[], Awaitable[Answer]], resume: Callable[[], Awaitable[object]]
    ) -> Answer:
        """Send a request while the server is paused, require that it waits, resume, and return its answer."""
        waiting = asyncio.ensure_future(asking())
        try:
            await asyncio.wait([waiting], timeout=_WAITS_S)
            if waiting.done():
                raise AssertionError(f"a request during a pause got {waiting.result().shown}; expected that it waits")
            await resume()
            return await waiting
        finally:
            waiting.cancel()

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | str | None,
        query: Mapping[str, str] | None,
        more_headers: Mapping[str, str] | None = None,
    ) -> httpx.Request:
        access = self._access
        key = access.api_key if path.startswith(_DATA) else access.control_key or access.api_key
        headers = {**(more_headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        content = json.dumps(body) if isinstance(body, Mapping) else body
        if content is not None:
            headers["content-type"] = "application/json"
        return self._client.build_request(method, path, content=content, params=query, headers=headers)


def _require_offered(answer: Answer) -> None:
    if answer.status in _NOT_OFFERED:
        raise RouteRefused(f"{answer.asked}: {answer.shown}")


def ok(answer: Answer) -> Answer:
    """Return an answer of status 200.

    Raises:
        RouteRefused: The server does not offer the route.
        AssertionError: The answer has another status.
    """
    _require_offered(answer)
    answer.require(200)
    return answer


@asynccontextmanager
async def connected(access: Access) -> AsyncIterator[Target]:
    """Connect to a server, and learn its dialect and model from ``/v1/models``.

    Raises:
        InvalidConfig: No server answers, or it lists no model, wants a key, or is of an unknown dialect.
    """
    url = access.url
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidConfig(f"--url {url}: {error}", field="--url") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise InvalidConfig(f"--url {url}: expected an address such as http://127.0.0.1:8000", field="--url")
    base = url.rstrip("/").removesuffix("/v1")
    # No proxy: the address is a server of one's own. A connection for each request: vLLM resets those on which it has
    # answered 500, and the next case would fail.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=base, timeout=access.timeout, trust_env=False, limits=limits) as client:
        card = await _first_card(client, access)
        owner = card.mapping().get("owned_by")
        dialect = access.dialect or _OWNERS.get(str(owner))
        if dialect is None:
            raise InvalidConfig(
                f"--url {url}: its model is owned by {owner!r}, which tells no dialect; give --dialect",
                field="--dialect",
            )
        yield Target(client, access, dialect, card)


async def _first_card(client: httpx.AsyncClient, access: Access) -> Field:
    url, headers = access.url, {"authorization": f"Bearer {access.api_key}"} if access.api_key else {}
    try:
        async with asyncio.timeout(access.timeout):
            response = await client.get("/v1/models", headers=headers)
    except (TimeoutError, httpx.HTTPError) as error:
        said = str(error) or f"no answer within {access.timeout:g} s"
        raise InvalidConfig(
            f"--url {url}: the server cannot be reached: {said}; start it, or mend the address", field="--url"
        ) from None
    if response.status_code == 401:
        raise InvalidConfig(f"--url {url}: the server wants a key; give --api-key", field="--api-key")
    try:
        assert response.status_code == 200, f"status {response.status_code}"
        card = parsed(response.content, "/v1/models")["data"][0]
        card["id"].text()
    except AssertionError as error:
        raise InvalidConfig(f"--url {url}: /v1/models lists no model: {error}", field="--url") from None
    return card
