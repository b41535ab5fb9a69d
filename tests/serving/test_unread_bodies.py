"""Answers before the end of a request: its client gets them, also if it sends all before it reads, within bounds."""

from __future__ import annotations

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.front_ends.places import PassesOn, Places
from drivetrain_serving.http_layer import app_on_socket
from drivetrain_serving.http_layer.app_on_socket import AppOnSocket
from engines import HANGING

pytestmark = pytest.mark.asyncio(loop_scope="session")

API, CONTROL = "a-key-for-requests", "a-key-for-weights!"
MOST, SIZE = 8 << 20, 15 << 20
"""Largest body of a server, and a body that is larger than what sockets hold but that it still reads to its end."""
PIECE = 1 << 16
NEVER = 10 * HANGING
JSON = "content-type: application/json"


@dataclass(frozen=True)
class Early:
    """A request that is answered before its end."""

    status: int
    path: str
    headers: tuple[str, ...]
    method: str = "POST"
    closes: bool = False
    """The server cannot find the next request, or does not want it."""

    def head(self, *more: str) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: localhost", *self.headers, *more, "", ""]
        return "\r\n".join(lines).encode()


def keyed(key: str) -> tuple[str, ...]:
    return (JSON, f"authorization: Bearer {key}")


EARLY = {
    "no key of requests": Early(401, "/v1/completions", (JSON,)),
    "no key of sessions": Early(401, "/sessions/one/v1/chat/completions", (JSON,)),
    "the wrong key": Early(401, "/v1/completions", keyed("another-key-than-ours")),
    "no key of control": Early(401, "/update_weights", keyed(API)),
    "no such path": Early(404, "/nowhere", keyed(CONTROL)),
    "no such method": Early(405, "/v1/completions", keyed(CONTROL), method="PUT"),
    "a body that is none": Early(200, "/health", (), method="GET"),
    "a wrong type": Early(400, "/v1/completions", (f"authorization: Bearer {API}", "content-type: text/plain")),
    "too large": Early(413, "/v1/completions", keyed(API), closes=True),
    "too large for control": Early(413, "/update_weights", keyed(CONTROL), closes=True),
    "too many headers": Early(431, "/v1/completions", (JSON, f"x-long: {'a' * (1 << 20)}"), closes=True),
    "an unknown coding": Early(501, "/v1/completions", (JSON, "transfer-encoding: gzip"), closes=True),
    "no header": Early(400, "/v1/completions", (JSON, "nothing"), closes=True),
}


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(HANGING):
            yield reader, writer
    finally:
        writer.close()


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


@asynccontextmanager
async def serving(engine: InferenceEngine, **more: object) -> AsyncIterator[int]:
    config = ServerConfig.model_validate(
        {"port": 0, "api_key": API, "control_key": CONTROL, "max_body_bytes": MOST} | more
    )
    async with Server(engine, config) as server:
        yield port_of(server)


def closing(wanted: bool) -> tuple[str, ...]:
    return ("connection: close",) if wanted else ()


async def answer(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
    """Read an answer to its end; return its status and headers."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers


async def sends_all_and_then_reads(port: int, early: Early, *, chunked: bool, close: bool, then: int = 200) -> None:
    """Require that the request is answered, and that its connection takes the next one or is closed as it said."""
    length = "transfer-encoding: chunked" if chunked else f"content-length: {SIZE}"
    head = early.head(length, *closing(close))
    async with connection(port) as (reader, writer):
        writer.write(head)
        for _ in range(SIZE // PIECE):
            writer.write((b"10000\r\n" if chunked else b"") + b" " * PIECE + (b"\r\n" if chunked else b""))
        writer.write(b"0\r\n\r\n" if chunked else b"")
        await writer.drain()
        status, headers = await answer(reader)
        assert status == early.status
        closes = early.closes or close
        assert (headers.get("connection") == "close") == closes
        if closes:
            assert await reader.read() == b""
            return
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await answer(reader))[0] == then


@pytest.mark.parametrize("close", [False, True], ids=["kept", "closed"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_client_that_sends_all_before_it_reads_is_answered(
    engine: InferenceEngine, chunked: bool, close: bool
) -> None:
    async with serving(engine) as port:
        for name, early in EARLY.items():
            if not (chunked and name == "an unknown coding"):
                await sends_all_and_then_reads(port, early, chunked=chunked, close=close)


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with 401, and read no body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def on_a_port(app: ASGIApp) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    served = AppOnSocket(app, listening, ServerConfig(max_body_bytes=MOST, body_timeout=NEVER))
    await served.start()
    yield port
    await served.close()


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_server_that_does_not_read_on_is_caught(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong server of the test above: uvicorn's own protocol."""
    monkeypatch.setattr(app_on_socket, "protocol_of", lambda *_, **__: H11Protocol)
    async with on_a_port(refuses) as port:
        with pytest.raises(ConnectionError):
            await sends_all_and_then_reads(port, Early(401, "/", ()), chunked=chunked, close=True)


def with_urllib(url: str, headers: dict[str, str]) -> int:
    try:
        urllib.request.urlopen(urllib.request.Request(url, b" " * SIZE, headers), timeout=HANGING)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    raise AssertionError("it was not refused")


def with_http_client(url: str, headers: dict[str, str]) -> int:
    address = httpx.URL(url)
    client = http.client.HTTPConnection(address.host, address.port or 80, timeout=HANGING)
    try:
        client.request("POST", address.path, pieces(), headers, encode_chunked=True)
        return client.getresponse().status
    finally:
        client.close()


def with_httpx(url: str, headers: dict[str, str]) -> int:
    with httpx.Client(timeout=HANGING, trust_env=False) as client:
        status = client.post(url, content=pieces(), headers=headers).status_code
        assert client.get(httpx.URL(url).join("/health")).status_code == 200
        return status


def with_openai(url: str, headers: dict[str, str]) -> int:
    key = headers.get("authorization", "Bearer another-key-than-ours").removeprefix("Bearer ")
    base = str(httpx.URL(url).join("/v1"))
    with openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=HANGING) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="policy", prompt=" " * SIZE)
    return caught.value.status_code


def pieces() -> Iterator[bytes]:
    for _ in range(SIZE // PIECE):
        yield b" " * PIECE


@pytest.mark.parametrize("ask", [with_urllib, with_http_client, with_httpx, with_openai])
async def test_libraries_get_the_answer(engine: InferenceEngine, ask: Callable[[str, dict[str, str]], int]) -> None:
    headers = {"content-type": "application/json"}
    async with serving(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert await asyncio.to_thread(ask, url, headers) == 401
        assert await asyncio.to_thread(ask, url, {**headers, "authorization": f"Bearer {API}"}) == 413


@pytest.mark.parametrize("close", [False, True], ids=["kept", "closed"])
async def test_a_body_without_end_is_cut_off(engine: InferenceEngine, close: bool) -> None:
    early = EARLY["no key of requests"]
    async with serving(engine) as port, connection(port) as (reader, writer):
        writer.write(early.head("transfer-encoding: chunked", *closing(close)))
        assert (await answer(reader))[0] == 401
        sent = 0
        with suppress(ConnectionError):
            while sent < 16 * MOST:
                writer.write(b"10000\r\n" + b" " * PIECE + b"\r\n")
                await writer.drain()
                sent += PIECE
        assert 2 * MOST <= sent < 16 * MOST


@pytest.mark.parametrize("close", [False, True], ids=["kept", "closed"])
async def test_a_body_that_stops_is_given_up(engine: InferenceEngine, close: bool) -> None:
    early = EARLY["no key of requests"]
    async with serving(engine, body_timeout=0.2) as port, connection(port) as (reader, writer):
        writer.write(early.head(f"content-length: {SIZE}", *closing(close)) + b"{")
        assert (await answer(reader))[0] == 401
        writer.write(b" ")
        assert await reads_to_the_end(reader)


async def test_junk_after_a_refused_body_is_cut_off() -> None:
    async with on_a_port(refuses) as port, connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{")
        assert (await answer(reader))[0] == 401
        writer.write(b"}no request\r\n\r\n")
        assert (await answer(reader))[0] == 400
        assert await reader.read() == b""
        sent = 0
        with suppress(ConnectionError):
            while sent < 16 * MOST:
                writer.write(b" " * PIECE)
                await writer.drain()
                sent += PIECE
        assert sent < 16 * MOST


async def reads_to_the_end(reader: asyncio.StreamReader) -> bool:
    """Return True once the server has closed or reset the connection."""
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    return True


async def test_a_kept_connection_that_is_idle_afterwards_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(uvicorn.Config):
        def load(self) -> None:
            super().load()
            self.timeout_keep_alive = 1

    monkeypatch.setattr(uvicorn, "Config", Impatient)
    async with on_a_port(refuses) as port, connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{")
        assert (await answer(reader))[0] == 401
        writer.write(b"}")
        assert await reader.read() == b""


async def test_a_client_that_waits_to_be_told_to_send_is_answered_and_left(engine: InferenceEngine) -> None:
    for name in ("no key of requests", "no such path", "too large"):
        async with serving(engine) as port, connection(port) as (reader, writer):
            writer.write(EARLY[name].head(f"content-length: {SIZE}", "expect: 100-continue"))
            status, headers = await answer(reader)
            assert (status, headers["connection"]) == (EARLY[name].status, "close")
            assert await reader.read() == b""


@pytest.mark.parametrize("method", ["POST", "HEAD"])
async def test_chunks_that_are_none_end_the_request(method: str) -> None:
    gone = asyncio.Event()

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        gone.set()

    async with on_a_port(reads) as port, connection(port) as (reader, writer):
        head = Early(400, "/", (), method).head("transfer-encoding: chunked")
        writer.write(head + b"1\r\n{\r\nno number\r\n" + b" " * SIZE)
        await writer.drain()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert bool(await reader.read()) == (method == "POST")
        await gone.wait()


async def test_a_server_that_ends_lets_its_answers_be_read(engine: InferenceEngine) -> None:
    """One client has been answered and still sends, and one still sends what will be taken."""
    config = ServerConfig(port=0, api_key=API, max_body_bytes=MOST, body_timeout=NEVER, shutdown_timeout=NEVER)
    server = Server(engine, config)
    await server.start()
    taken = b'{"prompt": [5], "max_tokens": 1}' + b" " * (MOST - 100)
    async with connection(port_of(server)) as (refused, sends), connection(port_of(server)) as (answered, asks):
        sends.write(EARLY["no key of requests"].head(f"content-length: {SIZE}") + b" ")
        asks.write(Early(200, "/v1/completions", keyed(API)).head(f"content-length: {len(taken)}") + taken[:10])
        await refused.readuntil(b" 401 ")
        ending = asyncio.create_task(server.close())
        await server_has_stopped_to_listen(port_of(server))
        sends.write(b" " * (SIZE - 1))
        asks.write(taken[10:])
        await sends.drain()
        await asks.drain()
        status, headers = await answer(answered)
        assert (status, headers["connection"]) == (200, "close")
        assert await answered.read() == b""
        assert (await refused.read()).endswith(b'{"error":"Unauthorized"}')
        await ending


async def server_has_stopped_to_listen(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0.01)


async def test_a_front_end_whose_owner_is_gone_answers_as_well(tmp_path: Path) -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the request was not passed on")

    gone = Early(500, "/update_weights", (JSON,))
    async with on_a_port(PassesOn(nothing, Places(tmp_path, 1), 0)) as port:
        for chunked in (False, True):
            for close in (False, True):
                await sends_all_and_then_reads(port, gone, chunked=chunked, close=close, then=500)
