"""Clients that keep the server waiting: each is given up in time, and a slow engine is not taken for one."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drivetrain import DrivetrainError, InferenceEngine, SamplingParams
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.http_layer.answers import event_stream
from drivetrain_serving.http_layer.app_on_socket import AppOnSocket, listening_path
from drivetrain_serving.http_layer.bodies import read_body
from drivetrain_serving.http_layer.passing_on import pass_on
from engines import HANGING, until, until_idle, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

NEVER = 10 * HANGING
SOON = 0.3
MIB = 1 << 20
PIECE = "a" * (MIB // 16)
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
PATHS = ("/v1/completions", "/update_weights", *(f"/sessions/s-{number}/v1/chat/completions" for number in range(4)))
"""Paths that the process which accepted the connection, the engine's owner, and either front-end answer."""
Way = Callable[..., AbstractAsyncContextManager[int]]
"""Serves an application within bounds, and yields the port."""


def head(path: str, *more: str) -> bytes:
    return (
        "\r\n".join((f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *more)).encode()
        + b"\r\n"
    )


def whole(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return head(path, f"content-length: {len(data)}", "connection: close") + b"\r\n" + data


def nothing(error: DrivetrainError) -> dict[str, object]:
    """Say nothing of an error that ends a stream."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[1, 2], ids=["one process", "two front-ends"])
async def port(served: InferenceEngine, request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """The port of an impatient server. Requests that are answered come in one piece, however busy the machine is."""
    bounds = {"header_timeout": SOON, "receive_timeout": SOON, "send_timeout": SOON}
    config = ServerConfig.model_validate(
        {"port": 0, "processes": request.param, "body_timeout": NEVER, "max_body_bytes": 8 * MIB} | bounds
    )
    async with Server(served, config) as server:
        yield int(server.url.rpartition(":")[2])


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 * MIB)
    try:
        async with asyncio.timeout(HANGING):
            yield reader, writer
    finally:
        writer.close()


async def got(port: int, *sent: bytes) -> list[int]:
    """Send bytes, each after an answer to those before; return the statuses of the answers when the server closes."""
    async with connection(port) as (reader, writer):
        statuses = []
        for index, data in enumerate(sent):
            if index:
                statuses.append(await status(reader))
            writer.write(data)
        while (more := await status(reader)) is not None:
            statuses.append(more)
    return [one for one in statuses if one is not None]


async def status(reader: asyncio.StreamReader) -> int | None:
    """Read an answer to its end; return its status, or None if the connection was closed instead."""
    first = await reader.read(1)
    if not first:
        return None
    lines = (first + await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    lengths = [line for line in lines if line.startswith("content-length: ")]
    await reader.readexactly(int(lengths[0].partition(" ")[2]))
    return int(lines[0].split()[1])


# Requests that do not come ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_headers_that_stop_are_given_up(port: int, engine: InferenceEngine) -> None:
    unfinished = (b"P", b"POST /v1/completions HT", head("/v1/completions"), head("/nowhere") + b"x-long: a")
    assert await asyncio.gather(*(got(port, one) for one in unfinished)) == [[408]] * 4
    assert await got(port, HEALTH, b"G") == [200, 408]
    assert await got(port, HEALTH + HEALTH + b"GET /hea") == [200, 200, 408]


async def test_headers_that_trickle_are_given_up(port: int, engine: InferenceEngine) -> None:
    async with connection(port) as (reader, writer):
        writer.write(head("/v1/completions") + b"x-long: ")
        answered = asyncio.create_task(status(reader))
        while not answered.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        assert await answered == 408
        assert await reader.read() == b""


async def test_bodies_that_stop_are_given_up(port: int, engine: InferenceEngine) -> None:
    async def asked(path: str, *more: bytes) -> None:
        async with connection(port) as (reader, writer):
            writer.write(b"".join(more))
            assert await status(reader) == 408, path

    length, chunked = b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
    await asyncio.gather(*(asked(path, head(path), body) for path in PATHS for body in (length, chunked)))


async def test_a_body_that_trickles_is_given_up(engine: InferenceEngine) -> None:
    async with Server(engine, ServerConfig(port=0, body_timeout=SOON, receive_timeout=NEVER)) as server:
        async with connection(int(server.url.rpartition(":")[2])) as (reader, writer):
            writer.write(head("/v1/completions", "content-length: 1000000") + b"\r\n")
            answered = asyncio.create_task(status(reader))
            while not answered.done():
                writer.write(b" ")
                await asyncio.sleep(0.01)
            assert await answered == 408


async def test_what_was_given_up_is_counted(port: int, engine: InferenceEngine) -> None:
    async def counted() -> float:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANGING) as client:
            text = (await client.get("/metrics")).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return sum(one.value for one in samples if one.labels == {"route": "unknown", "status": "408"})

    before = await counted()
    assert await asyncio.gather(*(got(port, b"POST") for _ in range(8))) == [[408]] * 8
    assert await counted() == before + 8


# Answers that are not taken ---------------------------------------------------------------------------------------


async def test_answers_that_are_not_taken_are_given_up(port: int, engine: InferenceEngine) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, DOCUMENT * 400))
        await until_reset(client)
        sending.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await sending


async def until_reset(client: socket.socket) -> None:
    polled = select.poll()
    polled.register(client, 0)
    await until(lambda: bool(polled.poll(0)))


@asynccontextmanager
async def on_a_port(app: ASGIApp, send_buffer: int | None = None, **bounds: object) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    served = AppOnSocket(app, listening, ServerConfig.model_validate({"body_timeout": NEVER} | bounds))
    await served.start()
    yield listening.getsockname()[1]
    await served.close()


def answering(size: int, *headers: tuple[bytes, bytes]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"%d" % size)
        await send({"type": "http.response.start", "status": 200, "headers": [length, *headers]})
        await send({"type": "http.response.body", "body": b"a" * size})

    return app


def streaming(size: int) -> ASGIApp:
    """Return an application that answers with as many bytes, and more, in events of 64 KiB."""

    async def pieces() -> AsyncGenerator[object, None]:
        for _ in range(size // len(PIECE)):
            yield PIECE

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await event_stream(pieces(), nothing))(scope, receive, send)

    return app


@asynccontextmanager
async def passed_on(app: ASGIApp, send_buffer: int | None = None, **bounds: object) -> AsyncIterator[int]:
    """Serve an application on a Unix socket, to which a port's requests are passed on, as front-ends do."""

    async def passing(scope: Scope, receive: Receive, send: Send) -> None:
        await pass_on(path, scope, receive, send, unreachable=lambda: Response("it is gone", 502))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "private.sock"
        private = AppOnSocket(app, listening_path(path), ServerConfig.model_validate({"body_timeout": NEVER} | bounds))
        await private.start()
        async with on_a_port(passing, send_buffer, **bounds) as port:
            yield port
        # A connection that has stayed there would be waited for.
        await until(
            lambda: not [one for one in psutil.Process().net_connections("unix") if str(one.laddr) == str(path)][1:]
        )
        await private.close()


ways = pytest.mark.parametrize("way", [on_a_port, passed_on])
answers = pytest.mark.parametrize("answer", [answering, streaming])


@ways
@answers
async def test_an_answer_that_is_not_taken_is_given_up(way: Way, answer: Callable[[int], ASGIApp]) -> None:
    async with way(answer(32 * MIB), send_timeout=SOON) as port:
        with taking_little(port) as client:
            client.sendall(HEALTH)
            await until_reset(client)


@ways
async def test_a_stream_that_is_not_taken_ends_in_the_engine(way: Way, engine: InferenceEngine) -> None:
    """The engine is paused meanwhile, so that its request cannot end by itself; the server does not keep the stream."""
    made, closed = 0, asyncio.Event()

    async def pieces() -> AsyncGenerator[object, None]:
        nonlocal made
        params = SamplingParams(max_new_tokens=400, ignore_eos=True)
        async with aclosing(engine.generate_stream("a", params)) as chunks:
            await anext(chunks)
            await engine.pause_generation("in_place")
            try:
                while made < 64 * MIB:
                    made += len(PIECE)
                    yield PIECE
                    await asyncio.sleep(0)  # as an engine's stream does; else nobody could notice that the client left
            finally:
                closed.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await event_stream(pieces(), nothing))(scope, receive, send)

    async with way(app, send_buffer=MIB // 16, send_timeout=SOON) as port:
        with taking_little(port) as client:
            client.sendall(HEALTH)
            await until_reset(client)
        async with asyncio.timeout(HANGING):
            await closed.wait()
    assert made <= 4 * MIB
    await engine.continue_generation()
    await until_idle(engine)


@pytest.mark.parametrize("pieces", [1, 2])
async def test_the_last_bytes_of_an_answer_are_given_up_too(pieces: int) -> None:
    """Answers of many sizes, some of which the kernel takes but for a few bytes; then the server closes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size = int(scope["path"][1:])
        parts = [b"a" * size, b"a"][:pieces]
        length = b"%d" % sum(map(len, parts))
        headers = [(b"content-length", length), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for left, part in enumerate(parts, 1 - pieces):
            await send({"type": "http.response.body", "body": part, "more_body": left < 0})
            await asyncio.sleep(0.05)  # meanwhile the kernel takes more of it

    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(on_a_port(app, send_timeout=SOON, send_buffer=MIB // 16))
        clients = set()
        for size in range(MIB // 16, MIB // 2, 8 << 10):
            client = stack.enter_context(taking_little(port))
            client.sendall(b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % size)
            await readable(client)
            clients.add(client.getsockname())
        await until(lambda: not clients & {one.raddr for one in psutil.Process().net_connections("tcp4")})


def taking_little(port: int) -> socket.socket:
    """Return a client whose kernel takes little of an answer ahead of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB // 16)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


async def take(client: socket.socket, size: int) -> None:
    while size > 0:
        data = await asyncio.get_running_loop().sock_recv(client, min(size, MIB // 8))
        assert data, "the answer was ended"
        size -= len(data)


async def readable(client: socket.socket) -> None:
    found, _, _ = await asyncio.to_thread(select.select, [client], [], [], HANGING)
    assert found, "there is no answer"


class Clock:
    """The clock of the running event loop, which can be put forward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._forward = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        patch.setattr(loop, "time", lambda: real() + self._forward)

    async def pass_by(self, seconds: float) -> None:
        """Let time pass, and what is due be done."""
        self._forward += seconds
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.asyncio(loop_scope="function")
@ways
@answers
async def test_an_answer_is_not_given_up_while_a_part_of_it_is_taken_in_each_period(
    monkeypatch: pytest.MonkeyPatch, way: Way, answer: Callable[[int], ASGIApp]
) -> None:
    clock, loop = Clock(monkeypatch), asyncio.get_running_loop()
    async with way(answer(32 * MIB), send_timeout=NEVER, keep_alive_timeout=round(1000 * NEVER)) as port:
        with taking_little(port) as client:
            await loop.sock_sendall(client, HEALTH)
            await take(client, MIB)
            for _ in range(8):  # the client takes less than the kernel must have sent to take more
                await clock.pass_by(0.9 * NEVER)
                await take(client, MIB // 4)
            await clock.pass_by(1.1 * NEVER)
            await clock.pass_by(1.1 * NEVER)
            await until_reset(client)


@pytest.mark.asyncio(loop_scope="function")
async def test_a_connection_without_a_request_is_closed_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    async with on_a_port(answering(1), keep_alive_timeout=round(NEVER), header_timeout=10 * NEVER) as port:
        for count in range(2):  # a new connection, and one that is kept
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(count):
                writer.write(HEALTH)
                assert await status(reader) == 200
            await clock.pass_by(0.9 * NEVER)
            assert not reader.at_eof()
            await clock.pass_by(0.2 * NEVER)
            assert await reader.read() == b""
            writer.close()


@pytest.mark.asyncio(loop_scope="function")
async def test_a_body_is_not_given_up_while_its_parts_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    config = ServerConfig(receive_timeout=NEVER, body_timeout=8 * NEVER)

    async def read(gaps: list[float], empty: bytes = b"a") -> bytes:
        remaining = list(gaps)

        async def receive() -> Message:
            if remaining:
                await clock.pass_by(remaining.pop(0))
            return {"type": "http.request", "body": empty, "more_body": bool(remaining)}

        return await read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), config)

    assert await read([0.9 * NEVER] * 8) == b"a" * 8
    for late in ([0.9 * NEVER, 1.1 * NEVER], [0.9 * NEVER] * 9):
        with pytest.raises(HTTPException, match="the body did not come within"):
            await read(late)


# An engine that takes its time ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_long_answer_is_waited_for(port: int, engine: InferenceEngine, stream: bool) -> None:
    """It takes longer than every bound of the server: the engine is paused meanwhile."""
    body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": stream}
    async with connection(port) as (reader, writer):
        writer.write(whole("/v1/completions", body))
        await until_running(engine, 1)
        await engine.pause_generation("in_place")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5 * SOON):
                await reader.read(64 * MIB) if not stream else await reads_for_ever(reader)
        await engine.continue_generation()
        ending = (await reader.read()).strip()
        assert ending.endswith(b"data: [DONE]\n\n\r\n0" if stream else b"}"), ending[-100:]
    await until_idle(engine)


async def reads_for_ever(reader: asyncio.StreamReader) -> None:
    while await reader.read(MIB):
        continue
    raise AssertionError("the stream was ended")
