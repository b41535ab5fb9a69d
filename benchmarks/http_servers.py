"""Measure HTTP servers and JSON libraries on the work of `drivetrain serve`: token ids in, token ids and logprobs out.

    pip install uvicorn httptools uvloop granian hypercorn aiohttp starlette orjson msgspec pydantic-core psutil
    python benchmarks/http_servers.py [--seconds 0.1] [--rounds 2] [--only json servers behaviour] [--json]

Use an environment made for it; of drivetrain nothing is imported.

Servers. Each candidate runs alone in a process on core 0: the application's event loop runs in a thread that this file
starts, as the loop of an engine does. (`granian process` is the exception: it starts a process and a loop of its own.)
The client runs on the last core and opens 1, 64 or 512 connections. Each connection sends its next request when it has
the whole answer. An answer has 256 tokens with logprobs in the shape of OpenAI's completions. The requests:

- `bytes`: a prompt of 1,000 ids; the application reads it and answers with prepared bytes, so only HTTP is measured.
- `1k`, `32k`: a prompt of 1,000 or 32,000 ids is decoded, the handler awaits once, the answer is built and encoded.
- `stream`: as `1k`, but each token is an event of its own, and the handler awaits before each.

The figure is the number of requests per second of CPU time that the server's processes and threads used. Other work on
the machine disturbs this figure less than it disturbs requests per second of wall time, which `--json` has too.

JSON. Microseconds to decode a request, and to build and encode an answer or one event of a stream.

Behaviour. Each server is asked about the events that a server of long requests depends on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TOKENS = 256
CONNECTIONS = (1, 64, 512)
JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [(b"content-type", b"text/event-stream")]


# The work ---------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct):
    model: str
    prompt: list[int]
    max_tokens: int
    logprobs: int
    stream: bool = False


class Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: Logprobs


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]


SAMPLED = [(7919 * index) % 151_000 for index in range(TOKENS)]
"""The ids of each answer; the logprobs below are as long as real ones."""
SAMPLED_LOGPROBS = [-0.1234567 * (1 + index % 37) for index in range(TOKENS)]


def completion(first: int, last: int, finish_reason: str | None) -> Completion:
    """Return an answer that holds the sampled tokens from ``first`` to ``last``."""
    ids, logprobs = SAMPLED[first:last], SAMPLED_LOGPROBS[first:last]
    tokens = [f"token_id:{token}" for token in ids]
    top: list[dict[str, float]] = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
    found = Logprobs(tokens, logprobs, top, [0] * len(ids))
    choice = Choice(0, "", ids, finish_reason, found)
    return Completion("cmpl-1", "text_completion", 1_795_000_000, "model", [choice])


def completion_dict(first: int, last: int, finish_reason: str | None) -> dict[str, object]:
    """Return the same answer as dicts and lists."""
    ids, logprobs = SAMPLED[first:last], SAMPLED_LOGPROBS[first:last]
    tokens = [f"token_id:{token}" for token in ids]
    found = {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        "text_offset": [0] * len(ids),
    }
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish_reason, "logprobs": found}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1_795_000_000,
        "model": "model",
        "choices": [choice],
    }


decode = msgspec.json.Decoder(Request).decode
encode = msgspec.json.Encoder().encode
PREPARED = encode(completion(0, TOKENS, "length"))


def request_body(prompt: int, stream: bool = False) -> bytes:
    ids = [(104_729 * index) % 151_000 for index in range(prompt)]
    return json.dumps({"model": "m", "prompt": ids, "max_tokens": TOKENS, "logprobs": 0, "stream": stream}).encode()


# The application --------------------------------------------------------------------------------------------------


async def answer(send: Send, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left before its request was complete")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def completions(receive: Receive, send: Send) -> None:
    request = decode(await read(receive))
    if not request.stream:
        await asyncio.sleep(0)
        await answer(send, JSON_HEADERS, encode(completion(0, TOKENS, "length")))
        return
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
    for index in range(TOKENS):
        await asyncio.sleep(0)
        event = b"data: %b\n\n" % encode(completion(index, index + 1, None))
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def prepared(receive: Receive, send: Send) -> None:
    await read(receive)
    await answer(send, JSON_HEADERS, PREPARED)


left_after: list[float] = []
"""Seconds after which `/leave` saw that its client had gone."""


async def leave(receive: Receive, send: Send) -> None:
    """Wait for the client to go away; its answer is never sent."""
    await read(receive)
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(3):
            while (await receive())["type"] != "http.disconnect":
                pass
        left_after.append(time.perf_counter() - begun)
    except TimeoutError:
        await answer(send, JSON_HEADERS, b"{}")


async def left(receive: Receive, send: Send) -> None:
    await read(receive)
    await answer(send, JSON_HEADERS, json.dumps(left_after).encode())


async def slow(receive: Receive, send: Send) -> None:
    await read(receive)
    await asyncio.sleep(1.0)
    await answer(send, JSON_HEADERS, b"{}")


async def length(receive: Receive, send: Send) -> None:
    await answer(send, JSON_HEADERS, str(len(await read(receive))).encode())


ROUTES = {
    "/v1/completions": completions,
    "/prepared": prepared,
    "/leave": leave,
    "/left": left,
    "/slow": slow,
    "/length": length,
}


async def application(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    await ROUTES[scope["path"]](receive, send)


def starlette_application() -> Any:
    """Return the same routes behind starlette's router, with starlette's request and responses."""
    from starlette.applications import Starlette
    from starlette.requests import Request as StarletteRequest
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def events() -> Any:
        for index in range(TOKENS):
            await asyncio.sleep(0)
            yield b"data: %b\n\n" % encode(completion(index, index + 1, None))
        yield b"data: [DONE]\n\n"

    async def completions(http: StarletteRequest) -> Response:
        if decode(await http.body()).stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        await asyncio.sleep(0)
        return Response(encode(completion(0, TOKENS, "length")), media_type="application/json")

    async def prepared(http: StarletteRequest) -> Response:
        await http.body()
        return Response(PREPARED, media_type="application/json")

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/prepared", prepared, methods=["POST"]),
        ]
    )


# The servers ------------------------------------------------------------------------------------------------------

Stop = asyncio.Event


async def uvicorn(port: int, stop: Stop, http: str, app: Any = application) -> None:
    import uvicorn

    config = uvicorn.Config(app, port=port, http=http, access_log=False, log_level="error")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await stop.wait()
    server.should_exit = True
    await serving


async def hypercorn(port: int, stop: Stop) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog, config.loglevel = 2048, "ERROR"

    async def stopped() -> None:
        await stop.wait()

    await serve(application, config, shutdown_trigger=stopped)


async def granian_embedded(port: int, stop: Stop) -> None:
    from granian.constants import HTTPModes, Interfaces
    from granian.server.embed import Server

    server = Server(
        application, port=port, interface=Interfaces.ASGI, http=HTTPModes.http1, backlog=2048, log_enabled=False
    )
    serving = asyncio.create_task(server.serve())
    await stop.wait()
    server.stop()
    await serving


async def aiohttp(port: int, stop: Stop) -> None:
    """Serve the same routes without ASGI."""
    from aiohttp import web

    async def completions(http: web.Request) -> web.StreamResponse:
        if not decode(await http.read()).stream:
            await asyncio.sleep(0)
            return web.Response(body=encode(completion(0, TOKENS, "length")), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for index in range(TOKENS):
            await asyncio.sleep(0)
            await response.write(b"data: %b\n\n" % encode(completion(index, index + 1, None)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def prepared(http: web.Request) -> web.Response:
        await http.read()
        return web.Response(body=PREPARED, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/v1/completions", completions), web.post("/prepared", prepared)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=2048).start()
    await stop.wait()
    await runner.cleanup()


Serve = Callable[[int, Stop], Coroutine[Any, Any, None]]
SERVERS: dict[str, tuple[str, Serve]] = {
    "uvicorn h11": ("asyncio", lambda port, stop: uvicorn(port, stop, "h11")),
    "uvicorn h11 uvloop": ("uvloop", lambda port, stop: uvicorn(port, stop, "h11")),
    "uvicorn httptools": ("asyncio", lambda port, stop: uvicorn(port, stop, "httptools")),
    "uvicorn httptools uvloop": ("uvloop", lambda port, stop: uvicorn(port, stop, "httptools")),
    "starlette, uvicorn httptools uvloop": (
        "uvloop",
        lambda port, stop: uvicorn(port, stop, "httptools", starlette_application()),
    ),
    "granian embedded uvloop": ("uvloop", granian_embedded),
    "hypercorn uvloop": ("uvloop", hypercorn),
    "aiohttp.web uvloop": ("uvloop", aiohttp),
}
GRANIAN_PROCESS = "granian process uvloop"
NAMES = [*SERVERS, GRANIAN_PROCESS]
WITHOUT_ALL_ROUTES = {"starlette, uvicorn httptools uvloop", "aiohttp.web uvloop"}


def serve(name: str, port: int) -> None:
    """Run one server in an event loop of this process until this process gets SIGTERM."""
    os.sched_setaffinity(0, {0})
    if name == GRANIAN_PROCESS:
        from granian import Granian
        from granian.constants import HTTPModes, Interfaces, Loops

        target, loop = "http_servers:application", Loops.uvloop
        Granian(
            target,
            port=port,
            interface=Interfaces.ASGI,
            loop=loop,
            http=HTTPModes.http1,
            backlog=2048,
            log_enabled=False,
        ).serve()
        return
    loop_name, server = SERVERS[name]
    running: list[tuple[asyncio.AbstractEventLoop, Stop]] = []

    async def main() -> None:
        stop = Stop()
        running.append((asyncio.get_running_loop(), stop))
        await server(port, stop)

    def in_thread() -> None:
        import uvloop

        factory = uvloop.new_event_loop if loop_name == "uvloop" else asyncio.SelectorEventLoop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    def terminate(*_: object) -> None:
        loop, stop = running[0]
        loop.call_soon_threadsafe(stop.set)

    thread = threading.Thread(target=in_thread)
    signal.signal(signal.SIGTERM, terminate)
    thread.start()
    thread.join()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def started(name: str) -> Iterator[tuple[psutil.Process, int]]:
    port = free_port()
    folder = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "PYTHONPATH": folder}
    command = [sys.executable, __file__, "--serve", name, "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        try:
            for _ in range(200):
                time.sleep(0.05)
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended: {process.stderr.read().decode() if process.stderr else ''}")
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
            else:
                raise RuntimeError(f"{name} did not listen within 10 s")
            time.sleep(0.3)
            yield psutil.Process(process.pid), port
        finally:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                child.kill()
            process.kill()


# The client -------------------------------------------------------------------------------------------------------


def http_request(path: str, body: bytes, more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path.encode()
    return head + b"content-length: %d\r\n%b\r\n" % (len(body), more) + body


@dataclass
class Counts:
    answers: int = 0
    received: int = 0
    wrong: list[bytes] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """Sends one request after another; parses no more of an answer than where it ends."""

    def __init__(self, request: bytes, counts: Counts) -> None:
        self.request, self.counts = request, counts
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def send(self) -> None:
        self.head, self.missing, self.tail = b"", 0, b""
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.counts.received += len(data)
        if not self.missing:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self.head[:end].lower(), self.head[end + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self.counts.wrong.append(head)
                self.close()
                return
            at = head.find(b"content-length:")
            self.missing = -1 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
        if self.missing < 0:  # chunks; only the last one ends so
            self.tail = (self.tail + data)[-5:] if len(data) < 5 else data[-5:]
            if self.tail != b"0\r\n\r\n":
                return
        else:
            self.missing -= len(data)
            if self.missing:
                return
        self.counts.answers += 1
        if not self.closing:
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closing:
            self.counts.wrong.append(b"connection lost: " + repr(exc).encode())

    def close(self) -> None:
        self.closing = True
        self.transport.abort()


def used(process: psutil.Process) -> float:
    """Return the seconds of CPU time of all threads of a process and its children, to the nanosecond."""
    found = 0
    for one in [process, *process.children(recursive=True)]:
        for path in Path(f"/proc/{one.pid}/task").glob("*/schedstat"):
            found += int(path.read_text().split()[0])
    return found / 1e9


@dataclass
class Load:
    server: str
    work: str
    connections: int
    per_cpu_s: float
    per_s: float
    client_cpu: float
    rss_mib: float
    threads: int
    errors: int


WORK = {
    "bytes": http_request("/prepared", request_body(1_000)),
    "1k": http_request("/v1/completions", request_body(1_000)),
    "32k": http_request("/v1/completions", request_body(32_000)),
    "stream": http_request("/v1/completions", request_body(1_000, stream=True)),
}


async def opened(port: int, request: bytes, count: int, counts: Counts) -> list[Connection]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Connection(request, counts), "127.0.0.1", port) for _ in range(count)]
    return [protocol for _, protocol in made]


async def answer_bytes(port: int, request: bytes) -> float:
    """Return how many bytes an answer has, so that unfinished answers can be counted by their bytes."""
    counts = Counts()
    (one,) = await opened(port, request, 1, counts)
    async with asyncio.timeout(30):
        while not counts.answers and not counts.wrong:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    one.close()
    if counts.wrong:
        raise RuntimeError(f"the server answered {counts.wrong[0].decode()!r}")
    return counts.received / counts.answers


async def load(name: str, process: psutil.Process, port: int, work: str, connections: int, seconds: float) -> Load:
    """Warm a server up; load it until it has used ``seconds`` of CPU time, at most 14 times as long on the clock."""
    counts = Counts()
    size = await answer_bytes(port, WORK[work])
    clients = await opened(port, WORK[work], connections, counts)
    await asyncio.sleep(0.2)
    received, cpu, own, begun = counts.received, used(process), time.process_time(), time.perf_counter()
    while used(process) - cpu < seconds and time.perf_counter() - begun < 14 * seconds:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    took, own, cpu = time.perf_counter() - begun, time.process_time() - own, used(process) - cpu
    answers = (counts.received - received) / size
    every = [process, *process.children(recursive=True)]
    memory, threads = sum(one.memory_info().rss for one in every), sum(one.num_threads() for one in every)
    for client in clients:
        client.close()
    await asyncio.sleep(0.05)
    return Load(
        name,
        work,
        connections,
        answers / cpu if cpu else 0.0,
        answers / took,
        own / took,
        memory / 2**20,
        threads,
        len(counts.wrong),
    )


def measure_servers(names: list[str], seconds: float, rounds: int) -> list[Load]:
    """Load every server in turn, ``rounds`` times; keep each figure's better round."""
    import uvloop

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    best: dict[tuple[str, str, int], Load] = {}
    for _ in range(rounds):
        for name in names:
            with started(name) as (process, port), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                for work in WORK:
                    for connections in CONNECTIONS:
                        try:
                            found = runner.run(load(name, process, port, work, connections, seconds))
                        except (OSError, RuntimeError) as error:
                            print(f"{name}, {work}, {connections} connections: {error}", file=sys.stderr)
                            continue
                        key = name, work, connections
                        if key not in best or found.per_cpu_s > best[key].per_cpu_s:
                            best[key] = found
            print(f"{name}: done", file=sys.stderr)
    return list(best.values())


# Behaviour --------------------------------------------------------------------------------------------------------


@dataclass
class Behaviour:
    server: str
    disconnect_seen_after_s: float | None
    answered_after_sigterm: bool
    megabyte_of_headers: str
    body_kept_when_client_offers_h2c: str


def exchange(port: int, request: bytes, seconds: float = 5.0) -> bytes:
    """Send one request on a connection of its own; return what comes within ``seconds``."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        try:
            sock.sendall(request)
            while part := sock.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
    return found


def status(answer: bytes) -> str:
    return answer[9:12].decode() if answer else "no answer"


def behaviour(name: str) -> Behaviour:
    close = b"connection: close\r\n"
    with started(name) as (process, port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(http_request("/leave", b"{}"))
            time.sleep(0.3)
        time.sleep(1.0)
        seen = json.loads(exchange(port, http_request("/left", b"{}", close)).rpartition(b"\r\n\r\n")[2] or b"[]")
        many = b"".join(b"x-%d: %b\r\n" % (index, b"v" * 1000) for index in range(1000))
        headers = status(exchange(port, http_request("/length", b"{}", many + close)))
        offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
        kept = exchange(port, http_request("/length", b"1234567", offer), 1.0)
        answers: list[bytes] = []
        waiting = threading.Thread(target=lambda: answers.append(exchange(port, http_request("/slow", b"{}", close))))
        waiting.start()
        time.sleep(0.3)
        process.terminate()
        waiting.join()
    body = kept.partition(b"\r\n\r\n")[2]
    offered = "yes" if body[:1] == b"7" else f"no: {status(kept)} {body[:30].decode(errors='replace')}"
    after = max(0.0, seen[0] - 0.3) if seen else None
    return Behaviour(name, after, status(answers[0]) == "200", headers, offered)


# JSON -------------------------------------------------------------------------------------------------------------


@dataclass
class JSONCost:
    library: str
    work: str
    us: float


def microseconds(calls: dict[str, Callable[[], object]], samples: int = 30) -> dict[str, float]:
    """Return the least CPU time of each call; the calls are sampled in turn, for about 5 ms each time."""
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        begun = time.thread_time()
        call()
        repeats[name] = max(1, int(0.005 / max(time.thread_time() - begun, 1e-6)))
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(samples):
        for name, call in calls.items():
            begun = time.thread_time()
            for _ in range(repeats[name]):
                call()
            least[name] = min(least[name], (time.thread_time() - begun) / repeats[name])
    return {name: 1e6 * seconds for name, seconds in least.items()}


def measure_json() -> list[JSONCost]:
    import orjson
    import pydantic_core

    os.sched_setaffinity(0, {0})
    untyped = msgspec.json.Decoder().decode
    dumps = json.JSONEncoder(separators=(",", ":")).encode
    loads: dict[str, Callable[[bytes], object]] = {
        "stdlib": json.loads,
        "orjson": orjson.loads,
        "msgspec dict": untyped,
        "msgspec typed": decode,
        "pydantic-core": pydantic_core.from_json,
    }
    writes: dict[str, Callable[[int, int], bytes]] = {
        "stdlib": lambda first, last: dumps(completion_dict(first, last, None)).encode(),
        "orjson": lambda first, last: orjson.dumps(completion_dict(first, last, None)),
        "msgspec dict": lambda first, last: encode(completion_dict(first, last, None)),
        "msgspec typed": lambda first, last: encode(completion(first, last, None)),
        "pydantic-core": lambda first, last: pydantic_core.to_json(completion_dict(first, last, None)),
    }
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for prompt in (1_000, 32_000, 128_000):
        body = request_body(prompt)
        calls[f"decode {prompt // 1000}k ids"] = {name: partial(load_json, body) for name, load_json in loads.items()}
    for last, work in ((TOKENS, "answer of 256"), (1, "event")):
        calls[work] = {name: partial(write, 0, last) for name, write in writes.items()}
        calls[work]["(building dicts)"] = partial(completion_dict, 0, last, None)
        calls[work]["(building structs)"] = partial(completion, 0, last, None)
    return [JSONCost(name, work, us) for work, these in calls.items() for name, us in microseconds(these).items()]


# The run ----------------------------------------------------------------------------------------------------------


def table(rows: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    wide = max(map(len, rows))
    lines = [" " * wide + "".join(f"{column:>19}" for column in columns)]
    lines += [f"{name:<{wide}}" + "".join(f"{cells.get(c, ''):>19}" for c in columns) for name, cells in rows.items()]
    return "\n".join(lines)


def show_servers(loads: list[Load]) -> None:
    for work in WORK:
        rows: dict[str, dict[str, str]] = {}
        for connections in CONNECTIONS:
            these = [one for one in loads if one.work == work and one.connections == connections]
            best = max(one.per_cpu_s for one in these)
            for one in these:
                cells = rows.setdefault(one.server, {})
                wrong = f" {one.errors} errors" if one.errors else ""
                cells[f"{connections} connections"] = f"{one.per_cpu_s:,.0f} ({one.per_cpu_s / best:.2f}){wrong}"
        print(f"\n{work}: requests per server CPU second (ratio to the best)")
        print(table(rows))
    busy = max(one.client_cpu for one in loads if one.connections > 1)
    print(f"\nThe client used at most {busy:.0%} of its core. Most memory and threads of each server:")
    for name in dict.fromkeys(one.server for one in loads):
        these = [one for one in loads if one.server == name]
        print(f"  {name}: {max(one.rss_mib for one in these):.0f} MiB, {max(one.threads for one in these)} threads")


def show_json(costs: list[JSONCost]) -> None:
    best = {
        work: min(one.us for one in costs if one.work == work and "(" not in one.library)
        for work in dict.fromkeys(one.work for one in costs)
    }
    rows: dict[str, dict[str, str]] = {}
    for one in costs:
        rows.setdefault(one.library, {})[one.work] = f"{one.us:,.1f} ({one.us / best[one.work]:.2f})"
    print("\nJSON: microseconds (ratio to the least); an answer or event is built and encoded")
    print(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, help="CPU time of each measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=["json", "servers", "behaviour"])
    parser.add_argument("--servers", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.port)
        return
    costs = measure_json() if "json" in given.only else []
    everywhere = set(range(os.cpu_count() or 1))
    os.sched_setaffinity(0, everywhere)
    asked = [name for name in given.servers if name not in WITHOUT_ALL_ROUTES] if "behaviour" in given.only else []
    behaviours = [behaviour(name) for name in asked]
    loads = measure_servers(given.servers, given.seconds, given.rounds) if "servers" in given.only else []
    if given.json:
        print(
            json.dumps(
                {
                    key: [vars(one) for one in found]
                    for key, found in (("json", costs), ("behaviour", behaviours), ("servers", loads))
                },
                indent=1,
            )
        )
        return
    if costs:
        show_json(costs)
    if behaviours:
        print("\nBehaviour")
        for one in behaviours:
            print("  " + ", ".join(f"{key} {value}" for key, value in vars(one).items()))
    if loads:
        show_servers(loads)


if __name__ == "__main__":
    main()
