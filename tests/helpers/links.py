"""Networks that tests can cut: a relay that stops relaying, and a network namespace where this machine allows one."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Link(Protocol):
    """The network between this process and an engine's host."""

    def command(self) -> list[str]:
        """Return what a command must begin with to run at the far end."""
        ...

    async def near(self, endpoint: str) -> str:
        """Return the address at this end of what listens at ``endpoint`` of the far end."""
        ...

    def cut(self) -> None:
        """Let nothing through, in either direction."""

    def mend(self) -> None:
        """Let everything through again."""

    @property
    def far(self) -> str:
        """Host name to listen on at the far end."""
        ...


class Namespace:
    """A pair of virtual network cards, one of them in a namespace of its own."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        # The kernel removes a card some time after its namespace, so no two may share a name or an address.
        number, third = next(self._numbers), os.getpid() % 250
        self.card = f"dt{os.getpid()}-{number}"
        self.name = f"drivetrain-{self.card}"
        self.here, self.far = (f"10.213.{third}.{4 * (number % 60) + end}" for end in (1, 2))

    def lay(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.card, "type", "veth", "peer", "name", "far", "netns", self.name)
        _ip("addr", "add", f"{self.here}/30", "dev", self.card)
        _ip("link", "set", self.card, "up")
        _ip("-n", self.name, "addr", "add", f"{self.far}/30", "dev", "far")
        _ip("-n", self.name, "link", "set", "far", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")

    def remove(self) -> None:
        _ip("netns", "delete", self.name)

    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    async def near(self, endpoint: str) -> str:
        return endpoint

    def cut(self) -> None:
        # The far card goes down: this side's routes stay, and its packets get no answer.
        _ip("-n", self.name, "link", "set", "far", "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", "far", "up")
        _ip("neigh", "flush", "dev", self.card)  # the kernel remembers for a second that nobody answered


class Relay:
    """A relay that passes bytes on, or keeps all connections and passes nothing."""

    far = "127.0.0.1"

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._port = 0

    def command(self) -> list[str]:
        return []

    async def near(self, endpoint: str) -> str:
        self._port = int(endpoint.rpartition(":")[2])
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        there, to_there = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass_on(reader, to_there), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other end is closed below
        finally:
            writer.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def laid(kind: str) -> Iterator[Link]:
    """Lay a link of this kind."""
    if kind == "relay":
        link = Relay()
        yield link
        link.mend()
        link.server.close()
        return
    namespace = Namespace()
    try:
        namespace.lay()
        yield namespace
    finally:
        namespace.remove()


def kinds() -> list[str]:
    """Return the links that this process may lay."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return ["relay"]
    namespace = Namespace()
    try:
        namespace.lay()
    except subprocess.CalledProcessError:
        return ["relay"]
    finally:
        subprocess.run(["ip", "netns", "delete", namespace.name], capture_output=True, check=False)
    return ["relay", "namespace"]


KINDS = kinds()
