"""Measure what `drivetrain serve` adds to the engine that it serves, and what its gateway adds.

    python benchmarks/serving.py [--only routes throughput stream latency gateway flat] [--processes 1 2] [--json]

The engine is simulated: each request takes a stated time for each of its tokens and no CPU time, and any number run at
once. The server runs alone, in one process or with the front-ends of ``--processes``; the client, in this one, speaks
HTTP/1.1 over one connection for each client. All share the machine's cores.

- routes: milliseconds of the CPU time of the engine's process, and of the whole server if it has others, for a request
  of 1,000 ids that gets 256 tokens with logprobs at once, by route, beside the same by the Python page. This is what
  one core can serve at most.
- throughput: tokens per second through HTTP, divided by those of the same requests by the Python page, in turn, best of
  three rounds: 64 and 512 clients, 256 tokens each, 20 ms a token.
- stream: tokens per second of streams, divided by those of whole answers: 64 clients.
- latency: milliseconds that a request takes beyond the engine's own time, with 1,000 clients that each ask again at
  once: 256 tokens, 20 ms a token. Two servers in turn, one with the garbage collector's thresholds of ``drivetrain
  serve``, one with Python's; medians of the rounds (``--rounds``). The client's collector is off. On a machine with
  other work, ``chrt -r 1 python benchmarks/serving.py`` keeps that work from both.
- gateway: milliseconds that a turn of a session takes beyond the engine's own time, with conversations of 100,000 ids:
  sessions at once (``--sessions``), each taking two more turns after its first. The first turn tokenises the whole
  conversation. Beside it the time to read and write one request's text as JSON.
- flat: the server's memory, threads and descriptors after 5,000, 10,000 and 15,000 requests, and each time 2,000 more
  streams whose clients went away.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from simulated import SimulatedBackend, simulated_engine

from drivetrain import Capability, SamplingParams
from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.process.garbage_collection import steady_garbage_collection
from drivetrain.testing import tiny_model
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain_serving import Server, ServerConfig, SessionConfig

TOKENS = 256
MS_PER_TOKEN = 20.0
CONVERSATION = 100_000
ROUNDS = 3
CLIENTS = 1000
SESSIONS = (100, 300, 1000)


# The engine and the server ----------------------------------------------------------------------------------------


class TimedBackend(SimulatedBackend):
    """Makes letters in a stated time."""

    claimed = frozenset(
        {
            Capability.STREAMING,
            Capability.ABORT,
            Capability.IGNORE_EOS,
            Capability.PAUSE_ABORT,
            Capability.LOGPROBS_RAW,
            Capability.LOGPROBS_TEMPERATURE,
            Capability.VERSION_SPANS,
        }
    )
    context_length = 400_000

    def _result(self, request: GenerateRequest) -> GenerateResult:
        count = request.max_new_tokens
        made = [97 + index % 26 for index in range(count)]
        spans = [VersionSpan(self.config.weight_version, 0, count)]
        logprobs = [-1.25 - index / 7 for index in range(count)] if request.params.logprobs is not None else None
        return GenerateResult(made, FinishReason.LENGTH, spans, logprobs=logprobs)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.running += 1
        try:
            await asyncio.sleep(self.seconds * request.max_new_tokens)
            return self._result(request)
        finally:
            self.running -= 1

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        result, due = self._result(request), asyncio.get_running_loop().time()
        self.running += 1
        try:
            for index, token in enumerate(result.token_ids):
                due += self.seconds
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                yield TokenDelta([token], None if result.logprobs is None else [result.logprobs[index]])
            yield TokenDelta([], result=result)
        finally:
            self.running -= 1


async def serve(seconds: float, processes: int, *, rarely: bool) -> None:
    """Serve until standard input ends; each line of it asks for as many requests by the Python page, and their time.

    With ``rarely``, the garbage collector has the thresholds of ``drivetrain serve``, otherwise Python's.
    """
    async with simulated_engine(TimedBackend, tiny_model(), seconds) as engine, AsyncExitStack() as stack:
        stack.enter_context(steady_garbage_collection(holds_model=not rarely))
        sessions = SessionConfig(most_sessions=20_000, memory_bytes=8 << 30)
        config = ServerConfig(port=0, processes=processes, served_model_name=("m",), sessions=sessions)
        async with Server(engine, config) as server:
            print(server.url.rpartition(":")[2], flush=True)
            params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, logprobs=0)
            while line := await asyncio.to_thread(sys.stdin.readline):
                clients, each = map(int, line.split())
                prompts = [prompt(index) for index in range(clients)]

                async def client(index: int) -> None:
                    for _ in range(each):  # noqa: B023
                        await engine.generate([prompts[index]], params)  # noqa: B023

                begun = time.perf_counter()
                await asyncio.gather(*(client(index) for index in range(clients)))
                print(time.perf_counter() - begun, flush=True)


@dataclass
class Served:
    process: psutil.Process
    port: int
    pipes: subprocess.Popen[str]

    def by_page(self, clients: int, each: int) -> float:
        """Return the seconds of so many requests by the Python page in the server's process."""
        assert self.pipes.stdin is not None
        assert self.pipes.stdout is not None
        self.pipes.stdin.write(f"{clients} {each}\n")
        self.pipes.stdin.flush()
        return float(self.pipes.stdout.readline())

    def cpu(self) -> float:
        """Return the seconds of CPU time of the engine's process."""
        return cpu_of(self.process)

    def cpu_of_all(self) -> float:
        """Return the seconds of CPU time of all processes."""
        return sum(cpu_of(process) for process in self.all())

    def all(self) -> list[psutil.Process]:
        return [self.process, *self.process.children()]


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def served(seconds: float, processes: int, *, rarely: bool = False) -> Iterator[Served]:
    command = [sys.executable, __file__, "--serve", str(seconds), "--processes", str(processes)]
    command += ["--collect-rarely"] if rarely else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pipes:
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        yield Served(psutil.Process(pipes.pid), int(pipes.stdout.readline()), pipes)
        pipes.stdin.close()


# The client -------------------------------------------------------------------------------------------------------


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(97, 123) for _ in range(1000)]


def request_head(path: str, data: bytes) -> bytes:
    headers = ("host: localhost", "content-type: application/json", f"content-length: {len(data)}")
    return "\r\n".join((f"POST {path} HTTP/1.1", *headers, "", "")).encode()


class Client:
    """One connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: object) -> bytes:
        """Send a request, and return the whole answer's body."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        assert self._reader is not None
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._writer.write(request_head(path, data) + data)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not headers.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{path}: {headers.decode()} {(await self._reader.read(2000)).decode()}")
        if b"transfer-encoding: chunked" not in headers:
            size = int(headers.partition(b"content-length:")[2].partition(b"\r\n")[0])
            return await self._reader.readexactly(size)
        parts = []
        while size := int(await self._reader.readline(), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readline()
        return b"".join(parts)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None


async def by_http(port: int, clients: int, each: int, path: str, body: Callable[[int], object]) -> float:
    """Return the seconds that so many clients take for so many requests each."""
    encoded = [json.dumps(body(index)).encode() for index in range(clients)]
    connections = [Client(port) for _ in range(clients)]

    async def client(index: int) -> None:
        for _ in range(each):
            await connections[index].post(path, encoded[index])

    begun = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(clients)))
    took = time.perf_counter() - begun
    for connection in connections:
        connection.close()
    return took


def completion(index: int) -> dict[str, object]:
    return {"model": "m", "prompt": prompt(index), "max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True}


def streamed_completion(index: int) -> dict[str, object]:
    return {**completion(index), "stream": True}


def vllm_generate(index: int) -> dict[str, object]:
    params = {"max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True}
    return {"model": "m", "token_ids": prompt(index), "sampling_params": params}


def sglang_generate(index: int) -> dict[str, object]:
    params = {"max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": prompt(index), "sampling_params": params, "return_logprob": True}


ROUTES: dict[str, Callable[[int], object]] = {
    "/v1/completions": completion,
    "/inference/v1/generate": vllm_generate,
    "/generate": sglang_generate,
}


# Measurements -----------------------------------------------------------------------------------------------------


async def routes(processes: int) -> dict[str, float]:
    cases = {
        **{name: (name, body, 25) for name, body in ROUTES.items()},
        "streams": ("/v1/completions", streamed_completion, 3),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*cases, "Python page")}
    with served(0.0, processes) as server:
        for number in range(ROUNDS + 1):
            for name in found:
                path, body, each = cases.get(name, ("", completion, 25))
                before = server.cpu(), server.cpu_of_all()
                if path:
                    await by_http(server.port, 8, each, path, body)
                else:
                    await asyncio.to_thread(server.by_page, 8, each)
                if number:
                    used = server.cpu() - before[0], server.cpu_of_all() - before[1]
                    found[name].append((used[0] * 1000 / 8 / each, used[1] * 1000 / 8 / each))
    figures = {f"{name}: ms of CPU a request": min(owner for owner, _ in times) for name, times in found.items()}
    if processes > 1:
        figures |= {f"{name}: the same of all processes": min(every for _, every in found[name]) for name in cases}
    return figures


async def throughput(processes: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with served(MS_PER_TOKEN / 1000, processes) as server:
        for clients in (64, 512):
            page, http = [], []
            for _ in range(ROUNDS):
                page.append(await asyncio.to_thread(server.by_page, clients, 1))
                http.append(await by_http(server.port, clients, 1, "/inference/v1/generate", vllm_generate))
            found[f"{clients} clients: HTTP, of the Python page"] = min(page) / min(http)
    return found


async def stream(processes: int) -> dict[str, float]:
    whole, streamed = [], []
    with served(MS_PER_TOKEN / 1000, processes) as server:
        for _ in range(ROUNDS):
            whole.append(await by_http(server.port, 64, 1, "/v1/completions", completion))
            streamed.append(
                await by_http(
                    server.port, 64, 1, "/v1/completions", lambda index: {**completion(index), "stream": True}
                )
            )
    return {"64 clients: streams, of whole answers": min(whole) / min(streamed)}


async def latency(processes: int, rounds: int = ROUNDS) -> dict[str, float]:
    kinds = {"with the thresholds of drivetrain serve": True, "with Python's thresholds": False}
    of_round: dict[str, list[list[float]]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(served(MS_PER_TOKEN / 1000, processes, rarely=rarely))
            for name, rarely in kinds.items()
        }
        bodies = [json.dumps(completion(index)).encode() for index in range(CLIENTS)]
        gc.collect()
        gc.disable()
        for number in range(rounds):
            for name in list(kinds)[:: 1 if number % 2 else -1]:
                of_round[name].append(await asked_again_and_again(servers[name].port, bodies))
        gc.enable()
    found: dict[str, float] = {}
    for name, each in of_round.items():
        quantiles = [[1000 * one for one in statistics.quantiles(times, n=100)] for times in each]
        found[f"{name}: p50 ms"] = statistics.median(one[49] for one in quantiles)
        found[f"{name}: p99 ms"] = statistics.median(one[98] for one in quantiles)
        found[f"{name}: slowest ms"] = statistics.median(1000 * max(times) for times in each)
        for number, one in enumerate(quantiles, 1):
            found[f"{name}: round {number}, p99 ms"] = one[98]
    return found


async def asked_again_and_again(port: int, bodies: Sequence[bytes]) -> list[float]:
    """Return the seconds beyond the engine's own of each request but the first of each client."""
    engine_s = MS_PER_TOKEN / 1000 * TOKENS
    found: list[float] = []

    async def client(index: int, body: bytes) -> None:
        connection = Client(port)
        await asyncio.sleep(engine_s * index / len(bodies))
        for number in range(4):
            begun = time.perf_counter()
            await connection.post("/v1/completions", body)
            if number:
                found.append(time.perf_counter() - begun - engine_s)
        connection.close()

    await asyncio.gather(*(client(index, body) for index, body in enumerate(bodies)))
    return found


async def gateway(processes: int, counts: Sequence[int] = SESSIONS) -> dict[str, float]:
    """Let sessions take turns, spread over the time that a turn takes."""
    found: dict[str, float] = {}
    text = "".join(random.Random(0).choices("abcdefghij ", k=CONVERSATION))
    begun = time.perf_counter()
    for _ in range(20):
        json.loads(json.dumps({"messages": [{"role": "user", "content": text}]}))
    found["JSON of one request's text, both ways: ms"] = 1000 * (time.perf_counter() - begun) / 20
    engine_s = MS_PER_TOKEN / 1000 * TOKENS
    for count in counts:
        first: list[float] = []
        later: list[float] = []
        rng = random.Random(count)

        async def session(number: int, port: int) -> None:
            connection = Client(port)
            messages: list[dict[str, object]] = [{"role": "user", "content": f"{number} {text}"}]
            # First turns take CPU time, so they are spread over more.
            await asyncio.sleep(rng.uniform(0, max(engine_s, count * 0.1)))  # noqa: B023
            for turn in range(3):
                body = {"model": "m", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
                data = json.dumps(body).encode()
                begun = time.perf_counter()
                answer = json.loads(await connection.post(f"/sessions/s{number}/v1/chat/completions", data))
                (first if turn == 0 else later).append(time.perf_counter() - begun - engine_s)  # noqa: B023
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                messages.append({"role": "user", "content": f"turn {turn}"})
            connection.close()

        with served(MS_PER_TOKEN / 1000, processes) as server:
            await asyncio.gather(*(session(number, server.port) for number in range(count)))
            found[f"{count} sessions: memory of the server, GB"] = (
                sum(one.memory_info().rss for one in server.all()) / 1e9
            )
        found[f"{count} sessions: first turn beyond the engine, p50 ms"] = 1000 * statistics.median(first)
        found[f"{count} sessions: later turns, p50 ms"] = 1000 * statistics.median(later)
        found[f"{count} sessions: later turns, p99 ms"] = 1000 * statistics.quantiles(later, n=100)[98]
    return found


async def flat(processes: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with served(0.0001, processes) as server:

        def record(when: str) -> None:
            found[f"{when}: MB"] = sum(one.memory_full_info().uss for one in server.all()) / 1e6
            found[f"{when}: threads"] = sum(one.num_threads() for one in server.all())
            found[f"{when}: descriptors"] = sum(one.num_fds() for one in server.all())

        async def gone(index: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            data = json.dumps(streamed_completion(index)).encode()
            writer.write(request_head("/v1/completions", data) + data)
            await reader.read(1000)
            writer.close()

        for round_number in (1, 2, 3):
            await by_http(server.port, 20, 250, "/v1/completions", completion)
            for first in range(0, 2000, 20):
                await asyncio.gather(*(gone(first + index) for index in range(20)))
            await asyncio.sleep(1)
            record(f"after {5 * round_number},000 requests, {2 * round_number},000 gone")
    return found


MEASURES: dict[str, Callable[[int], Awaitable[dict[str, float]]]] = {
    "routes": routes,
    "throughput": throughput,
    "stream": stream,
    "latency": latency,
    "gateway": gateway,
    "flat": flat,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1], help="front-ends, or 1; each is measured in turn"
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=SESSIONS, help="sessions at once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of latency")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--collect-rarely", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.serve, *given.processes, rarely=given.collect_rarely))
        return
    MEASURES["latency"] = partial(latency, rounds=given.rounds)
    MEASURES["gateway"] = partial(gateway, counts=given.sessions)
    found: dict[str, Any] = {}
    for name in given.only:
        for processes in given.processes:
            title = name if given.processes == [1] else f"{name}, processes={processes}"
            found[title] = asyncio.run(MEASURES[name](processes))  # type: ignore[arg-type]
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, figures in found.items():
        print(name)
        for what, figure in figures.items():
            print(f"  {what:56} {figure:12,.3f}")


if __name__ == "__main__":
    main()
