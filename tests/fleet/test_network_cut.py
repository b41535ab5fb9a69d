"""A fleet from which one engine's network is cut, without a word to either side.

A killed process closes its sockets, and a cut network does not: nothing arrives any more, and nothing is refused. The
engine is that of ``drivetrain host``, behind a relay that stops relaying, and in a network namespace where this machine
allows one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from drivetrain import Completion, DrivetrainError, InferenceEngine, MemberLost, SamplingParams, create_engine
from drivetrain_fleet import Health
from drivetrain_weight_sync import WeightSync
from fleets import BOUND, GREEDY, Fleet, local, tensors_for, until, until_health

pytestmark = pytest.mark.slow

KEY = "a key of enough characters"
HEARTBEAT_S = 3
TOKENS = 600
MIDDLE = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)


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


@asynccontextmanager
async def far_engine(link: Link, model: Path) -> AsyncIterator[str]:
    """Start ``drivetrain host`` at the far end; yield its endpoint at this end."""
    process = await asyncio.create_subprocess_exec(
        *(*link.command(), sys.executable, "-m", "drivetrain", "host", "--model", str(model)),
        *("--isolation", "inline", "--listen", f"{link.far}:0", "--set", f"timeouts={{heartbeat: {HEARTBEAT_S}}}"),
        stdout=subprocess.PIPE,
        env={**os.environ, "DRIVETRAIN_KEY": KEY},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("endpoint: "), line
        yield await link.near(line.removeprefix("endpoint: ").strip())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def remote(endpoint: str) -> InferenceEngine:
    """Make the page of the engine at an endpoint, not started."""
    return await asyncio.to_thread(create_engine, "remote", endpoint=endpoint, key=KEY)


@asynccontextmanager
async def fleet_with_a_far_engine(kind: str, model: Path) -> AsyncIterator[tuple[Fleet, Link, str]]:
    """Open a fleet of one engine of this process and one across a link; yield it, the link and the endpoint."""
    async with AsyncExitStack() as stack:
        link = stack.enter_context(laid(kind))
        endpoint = await stack.enter_async_context(far_engine(link, model))
        fleet = Fleet({"near": local(model), "far": await remote(endpoint)})
        yield await stack.enter_async_context(fleet), link, endpoint


async def streamed(fleet: Fleet, prompt: list[int]) -> list[Completion]:
    """Stream one completion."""
    return [chunk.completion async for chunk in fleet.generate_stream(prompt, MIDDLE) if chunk.completion is not None]


async def whole(fleet: Fleet, prompt: list[int]) -> list[Completion]:
    """Generate one completion."""
    return (await fleet.generate(prompt, MIDDLE)).completions


def versions(completions: list[Completion]) -> set[str]:
    return {span.version for completion in completions for span in completion.weight_versions}


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_end_and_the_engine_can_come_back(model: Path, kind: str) -> None:
    async with fleet_with_a_far_engine(kind, model) as (fleet, link, endpoint):
        tasks = [asyncio.create_task((streamed if i % 2 else whole)(fleet, [i + 1, i + 2])) for i in range(12)]
        await until(lambda: fleet.begun("far") == 6)
        link.cut()
        async with asyncio.timeout(BOUND):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [one for one in results if isinstance(one, BaseException)]
        assert len(lost) == 6
        assert all(isinstance(one, MemberLost) and one.member == "far" for one in lost), lost
        assert all(len(c.token_ids) == TOKENS for one in results if isinstance(one, list) for c in one)
        await until_health(fleet, "far", Health.FAILED)
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
            assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"one"}
            link.mend()
            gone = await fleet.remove("far")
            await gone.teardown()
            again = await remote(endpoint)
            await fleet.add(again, "again")
            assert fleet.report("again").health is Health.STALE
            assert (await again.stats()).running == 0, "its owner has given up what the lost holder asked for"
            await sync.push(version="two")
        output = await fleet.generate([[1], [2], [3], [4]], GREEDY)
        assert versions(output.completions) == {"two"}
        assert fleet.health() == ["ready", "ready"]


@pytest.mark.parametrize("kind", KINDS[-1:])
@pytest.mark.parametrize("call", ["prepare_weight_update", "pause_generation", "apply_update"])
async def test_a_push_commits_without_it_and_it_serves_nothing_between(model: Path, kind: str, call: str) -> None:
    async with fleet_with_a_far_engine(kind, model) as (fleet, link, endpoint):
        tasks = [asyncio.create_task(whole(fleet, [i + 1, 2])) for i in range(4)]
        await until(lambda: fleet.begun("far") == fleet.begun("near") == 2)
        member = fleet.member("far")
        ask = getattr(member.calls, call)

        async def cut_first(*arguments: object) -> object:
            link.cut()
            return await ask(*arguments)

        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            setattr(member.calls, call, cut_first)
            async with asyncio.timeout(BOUND):
                await sync.push(version="one")
            delattr(member.calls, call)
        async with asyncio.timeout(BOUND):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, DrivetrainError) for one in results if isinstance(one, BaseException)), results
        assert versions([c for one in results if isinstance(one, list) for c in one]) <= {"initial", "one"}
        await until_health(fleet, "far", Health.FAILED)
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"one"}
        link.mend()
        async with asyncio.timeout(BOUND):
            again = await remote(endpoint)
            async with again:
                await until(lambda: again.state.value in ("ready", "dirty"))
                if again.state.value == "ready":
                    found = await again.generate([1], GREEDY)
                    assert versions(found.completions) == {"initial"}, "nothing of an update that it never heard of"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_shorter_than_the_heartbeat_loses_nothing(model: Path, kind: str) -> None:
    async with fleet_with_a_far_engine(kind, model) as (fleet, link, _):
        tasks = [asyncio.create_task((streamed if i % 2 else whole)(fleet, [i + 1, 2])) for i in range(4)]
        await until(lambda: fleet.begun("far") == 2)
        link.cut()
        await asyncio.sleep(0.3)
        link.mend()
        async with asyncio.timeout(BOUND):
            results = await asyncio.gather(*tasks)
        assert all(len(completion.token_ids) == TOKENS for one in results for completion in one)
        assert fleet.health() == ["ready", "ready"]
