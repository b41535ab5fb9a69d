"""HTTP clients in a process of their own, for benchmarks of servers: many connections, and little work for each byte.

    python benchmarks/http_load.py < jobs

Each line of standard input is a :class:`Job` as JSON; each line of standard output is its :class:`Outcome`. Nothing of
drivetrain is imported, so that a process starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
"""The end of a chunked body; JSON holds no bare line feeds, so no event contains it."""


@dataclass(frozen=True)
class Job:
    """Connections that send one request after another, as long as the time lasts."""

    port: int
    connections: int
    path: str
    body: dict[str, object]
    """The request, without its prompt."""
    prompt_field: str
    prompt_tokens: int
    at: float
    """When to begin, as ``time.time()``."""
    seconds: float
    """Seconds in which requests begin; those that have begun run to their end."""
    think: float = 0.0
    """Mean seconds between an answer and the next request of its connection."""
    seed: int = 0
    must_contain: str = ""
    """Text that ends a complete answer."""


@dataclass
class Outcome:
    """Times of all requests, in seconds."""

    took: float = 0.0
    """From ``Job.at`` to the end of the last answer."""
    whole: list[float] = field(default_factory=list)
    """From each request to the end of its answer."""
    first: list[float] = field(default_factory=list)
    """From each request to the first bytes of its answer's body."""
    cpu: float = 0.0
    """CPU time of this process."""


class Connection(asyncio.Protocol):
    """One connection that is kept open."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._head = -1
        self._body_bytes: int | None = None
        self._answered: asyncio.Future[bytes] | None = None
        self.first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._head < 0:
            self._head = self._received.find(b"\r\n\r\n")
            if self._head < 0:
                return
            self._head += 4
            head = bytes(self._received[: self._head]).lower()
            _, named, after = head.partition(b"content-length:")
            self._body_bytes = int(after.partition(b"\r\n")[0]) if named else None
        if self.first == 0.0 and len(self._received) > self._head:
            self.first = time.perf_counter()
        if self._body_bytes is None:
            complete = self._received.endswith(_END_OF_CHUNKS)
        else:
            complete = len(self._received) == self._head + self._body_bytes
        if complete and self._answered is not None:
            self._answered.set_result(bytes(self._received))

    async def post(self, request: bytes) -> bytes:
        """Send a request; return the whole answer with its head."""
        assert self._transport is not None
        self._received.clear()
        self._head, self._body_bytes, self.first = -1, None, 0.0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def do(job: Job) -> Outcome:
    """Run a job.

    Raises:
        RuntimeError: an answer was no success, or not complete.
    """
    loop, outcome = asyncio.get_running_loop(), Outcome()
    rng = random.Random(job.seed)
    connections = []
    for _ in range(job.connections):
        _, connection = await loop.create_connection(Connection, "127.0.0.1", job.port)
        connections.append(connection)
    requests = [_request(job, rng) for _ in connections]
    used = time.process_time()
    await asyncio.sleep(max(0.0, job.at - time.time()))
    begun = time.perf_counter()

    async def send(connection: Connection, request: bytes) -> None:
        while True:
            if job.think:
                await asyncio.sleep(rng.uniform(0, 2 * job.think))
            sent = time.perf_counter()
            if sent - begun > job.seconds:
                return
            answer = await connection.post(request)
            outcome.whole.append(time.perf_counter() - sent)
            outcome.first.append(connection.first - sent)
            if not answer.startswith(b"HTTP/1.1 200") or job.must_contain.encode() not in answer[-2000:]:
                raise RuntimeError(f"{job.path}: {answer[:1000]!r} ... {answer[-500:]!r}")

    await asyncio.gather(*(send(*pair) for pair in zip(connections, requests, strict=True)))
    outcome.took = time.perf_counter() - begun
    outcome.cpu = time.process_time() - used
    for connection in connections:
        connection.close()
    return outcome


def _request(job: Job, rng: random.Random) -> bytes:
    prompt = [rng.randrange(97, 123) for _ in range(job.prompt_tokens)]
    body = json.dumps({**job.body, job.prompt_field: prompt}).encode()
    headers = ("host: localhost", "content-type: application/json", f"content-length: {len(body)}")
    return "\r\n".join((f"POST {job.path} HTTP/1.1", *headers, "", "")).encode() + body


def main() -> None:
    while line := sys.stdin.readline():
        outcome = asyncio.run(do(Job(**json.loads(line))))
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
