"""A server with two front-ends, and clients of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING

KEY, CONTROL = "a-key-for-requests", "a-key-for-control"
CONTROLS = {"Authorization": f"Bearer {CONTROL}"}


class Running:
    """A server with two front-ends, and clients that hold the control key."""

    def __init__(self, client: httpx.AsyncClient, stack: AsyncExitStack, others: Collection[str]) -> None:
        self.client = client
        """A client of the port. Each request makes a connection, which either front-end accepts."""
        self.each: list[httpx.AsyncClient] = []
        """A client of each front-end's own socket."""
        self._stack = stack
        self._others = others

    def front_ends(self) -> dict[str, psutil.Process]:
        """Return the front-ends that serve, by the path of their sockets."""
        return {path: one for path, one in all_front_ends().items() if path not in self._others}

    async def look(self) -> None:
        """Connect to the front-ends that run."""
        self.each = []
        for path in sorted(self.front_ends()):
            transport = httpx.AsyncHTTPTransport(uds=path)
            client = httpx.AsyncClient(transport=transport, base_url="http://x", timeout=HANGING, headers=CONTROLS)
            self.each.append(await self._stack.enter_async_context(client))

    async def answered(self, route: str) -> float:
        """Return how many answers of a route the metrics count."""
        families = text_string_to_metric_families((await self.client.get("/metrics")).text)
        return sum(one.value for family in families for one in family.samples if one.labels.get("route") == route)

    async def in_each(self, path: str, **body: Any) -> list[httpx.Response]:
        """Post to every front-end at once."""
        return list(await asyncio.gather(*(one.post(path, json=body) for one in self.each)))


def all_front_ends() -> dict[str, psutil.Process]:
    """Return the front-ends of all servers in this process that serve, by the path of their sockets.

    The younger of two with one path is returned: the kernel keeps a frozen one that was killed, and pids begin anew.
    """
    found: dict[str, psutil.Process] = {}
    for process in sorted(psutil.Process().children(), key=psutil.Process.create_time):
        with suppress(psutil.NoSuchProcess):
            if "drivetrain_serving.front_ends" in process.cmdline():
                paths = [str(one.laddr) for one in process.net_connections("unix")]
                found |= {path: process for path in paths if path.endswith(".sock")}
    return found


def text_of(answer: httpx.Response) -> str:
    """Return the text of an answer of ``/v1/completions``."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@asynccontextmanager
async def two_processes(engine: InferenceEngine, **more: Any) -> AsyncIterator[Running]:
    config = ServerConfig(port=0, processes=2, api_key=KEY, control_key=CONTROL, **more)
    limits = httpx.Limits(max_keepalive_connections=0)
    others = all_front_ends().keys()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(engine, config))
        client = httpx.AsyncClient(base_url=server.url, timeout=HANGING, headers=CONTROLS, limits=limits)
        running = Running(await stack.enter_async_context(client), stack, others)
        await running.look()
        assert len(running.each) == 2
        yield running
