"""Plan a fleet of 1,000 engines: measure our own code with that many, and simulate a push to that many hosts.

    python benchmarks/scale.py [--engines 10 100 1000] [--seed 0]

Measured in this process, in CPU time where both ends of a socket run here:

- Routing: one sample's way through the fleet's queue and router, with members whose engines were not started.
- State: memory of the prefix indices, one update of a load, one transition of health, one call of all members.
- Heartbeats: the thread that answers the pulses of holders, over real sockets.
- Frames: encoding and reading of the wire's frames, over a real socket into one event loop.
- Handle: requests to a simulated engine by its handle, over a Unix socket; owner and holder share one event loop.

Simulated, from the inputs that the output states: a push of weights to hosts of eight engines, to all hosts from the
trainer's host or down a tree of hosts, with stragglers and with a host that is lost. Needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import os
import platform
import random
import socket
import statistics
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from simulated import SimulatedBackend, simulated_engine

from drivetrain import Capability, InferenceEngine, SamplingParams, attach
from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.process.pulse import PulseWatch
from drivetrain.process.wire import FrameReader, Item, frame, from_host, read
from drivetrain.testing import tiny_model
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.sampling import LogprobsMode
from drivetrain_fleet.members import Member, Members, on_each
from drivetrain_fleet.prefix_index import BLOCK, Blocks, PrefixIndex
from drivetrain_fleet.routing import Router, RoutingPolicy
from drivetrain_fleet.sending import Sending

PROMPT: Final = 8_000
"""Tokens of a prompt; the first half is a system prompt that every engine has seen."""
NEW_TOKENS: Final = 32


class AtOnce(SimulatedBackend):
    """Makes all tokens of a request at once, so that a request costs only what drivetrain adds."""

    claimed = frozenset({Capability.STREAMING, Capability.ABORT, Capability.IGNORE_EOS, Capability.VERSION_SPANS})

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        made = [index % 250 for index in range(request.max_new_tokens)]
        for token in made:
            yield TokenDelta([token])
            await asyncio.sleep(0)
        spans = [VersionSpan(self.config.weight_version, 0, len(made))]
        yield TokenDelta([], result=GenerateResult(made, FinishReason.LENGTH, spans))


def engine_of(model: Path) -> InferenceEngine:
    return simulated_engine(AtOnce, model, 0.0)


def line(name: str, value: float, unit: str) -> None:
    print(f"  {name:<66} {value:>12,.2f} {unit}", flush=True)


def cpu_us(work: Callable[[], object], repeats: int) -> float:
    """Return CPU microseconds of one repetition: the best of three rounds."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        for _ in range(repeats):
            work()
        taken.append((time.process_time() - begun) / repeats)
    return 1e6 * min(taken)


# Routing and state ------------------------------------------------------------------------------------------------


def fleet_of(model: Path, count: int, policy: RoutingPolicy) -> Sending:
    """Return the part of a fleet that gives samples to members; all members are ready."""
    members = Members()
    sending = Sending(members, Router(policy), 1000, None, lambda: False)
    for number in range(count):
        member = Member(f"engine {number}", engine_of(model), lambda _: sending.changed())
        member.move_to(member.status.start("v0"))
        members.put(member)
    return sending


def request_of(number: int, ids: list[int]) -> GenerateRequest:
    return GenerateRequest(str(number), ids, SamplingParams(), NEW_TOKENS, (), LogprobsMode.RAW)


async def route(model: Path, count: int, policy: RoutingPolicy) -> float:
    """Return CPU microseconds of one sample's way in and out, its prompt's hashing included: a median of rounds."""
    return statistics.median([await route_once(model, count, policy) for _ in range(4)][1:])


async def route_once(model: Path, count: int, policy: RoutingPolicy) -> float:
    sending = fleet_of(model, count, policy)
    rng = random.Random(0)
    system = [rng.randrange(250) for _ in range(PROMPT // 2)]
    for member in sending.members:
        sending.router.sent(sending.open(request_of(-1, system), None).work, member.name)
    requests = 300
    prompts = [system + [rng.randrange(250) for _ in range(PROMPT // 2)] for _ in range(requests)]
    under_way = []
    begun = time.process_time()
    for number, ids in enumerate(prompts):
        ticket = sending.open(request_of(number, ids), None)
        await sending.enter(ticket)
        under_way.append(ticket)
        if len(under_way) > 100:
            oldest = under_way.pop(0)
            sending.leave(oldest)
            sending.close(oldest)
            await asyncio.sleep(0)
    return 1e6 * (time.process_time() - begun) / requests


async def control(model: Path, count: int) -> tuple[float, float, float]:
    """Return CPU microseconds of one load update, of one transition of health, and of one empty call of all."""
    sending = fleet_of(model, count, RoutingPolicy(prefix_affinity=False))
    ticket = sending.open(request_of(0, [1] * 10), None)
    await sending.enter(ticket)
    ticket.left = 10**9
    load = cpu_us(lambda: sending.progress(ticket, 1), 20_000)
    members = list(sending.members)

    def update() -> None:
        for member in members:
            member.move_to(member.status.begin_update())
        for member in members:
            member.move_to(member.status.commit("v1"))

    health = cpu_us(update, 3) / (2 * count)

    async def nothing(member: Member) -> None:
        await asyncio.sleep(0)

    begun = time.process_time()
    for _ in range(5):
        await on_each(members, nothing, 60.0)
    return load, health, 1e6 * (time.process_time() - begun) / 5


def index_bytes() -> float:
    """Return bytes of memory per remembered block of a full index, hashes included."""
    capacity = RoutingPolicy().prefix_blocks
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(256 * BLOCK)] for _ in range(capacity // 256)]
    tracemalloc.start()
    index = PrefixIndex(capacity)
    for ids in prompts:
        index.add(Blocks.of(ids))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / len(index)


# Sockets ----------------------------------------------------------------------------------------------------------


def beats(holders: int, *, together: bool) -> float:
    """Return CPU microseconds of the answering thread per beat.

    Args:
        holders: Holders of one engine.
        together: All beat at the same time, or one after another.
    """
    watch = PulseWatch()
    ours = []
    for _ in range(holders):
        mine, theirs = socket.socketpair()
        theirs.setblocking(False)
        watch.add(theirs, 60.0, lambda reason: None)
        ours.append(mine)
    watch.start()
    time.sleep(0.6)  # until the thread has seen all of them
    rounds = max(2, 500 // holders) if together else 1
    some = ours if together else ours[:300]
    everything, mine_alone = time.process_time(), time.thread_time()
    for _ in range(rounds):
        if together:
            for one in some:
                one.send(b"\x01")
            for one in some:
                one.recv(1)
        else:
            for one in some:
                one.send(b"\x01")
                one.recv(1)
    used = (time.process_time() - everything) - (time.thread_time() - mine_alone)
    watch.stop()
    for one in ours:
        one.close()
    return 1e6 * used / (rounds * len(some))


class Frames(asyncio.Protocol):
    """Reads frames as a holder's connection does."""

    def __init__(self, expected: int) -> None:
        self.reader = FrameReader()
        self.left = expected
        self.reads = 0
        self.all_came = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        for payload in self.reader.feed(data):
            read(from_host, payload)
            self.left -= 1
        if self.left <= 0 and not self.all_came.done():
            self.all_came.set_result(None)


async def frames(count: int, at_a_time: int) -> tuple[float, float]:
    """Return CPU microseconds of one event loop per frame that it receives, and the frames that came in one read."""
    mine, theirs = socket.socketpair()
    data = b"".join(frame(Item(1, msgspec.Raw(msgspec.msgpack.encode([17]))))) * at_a_time
    transport, protocol = await asyncio.get_running_loop().create_connection(lambda: Frames(count), sock=theirs)

    def send() -> None:
        for _ in range(count // at_a_time):
            mine.sendall(data)

    sender = threading.Thread(target=send)
    begun = time.thread_time()
    sender.start()
    await protocol.all_came
    used = time.thread_time() - begun
    sender.join()
    transport.close()
    mine.close()
    return 1e6 * used / count, count / protocol.reads


async def requests(model: Path) -> tuple[float, float]:
    """Return CPU microseconds of a request to an engine in this process, and by its handle; 64 are under way."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    total = 512

    async def used(engine: InferenceEngine) -> float:
        room = asyncio.Semaphore(64)

        async def one() -> None:
            async with room:
                await engine.generate([[1] * 64], params)

        await one()
        begun = time.process_time()
        await asyncio.gather(*(one() for _ in range(total)))
        return 1e6 * (time.process_time() - begun) / total

    async with engine_of(model) as engine:
        attached = await attach(await engine.handle())
        # In turn, without the first round: what runs first in a new process costs up to twice as much.
        rounds = [(await used(engine), await used(attached)) for _ in range(4)][1:]
        await attached.teardown()
    return statistics.median(one[0] for one in rounds), statistics.median(one[1] for one in rounds)


# A push, simulated ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Push:
    """Stated inputs of the simulation. None of them was measured here."""

    gigabytes: float = 15.2
    """A model of 7.6 billion parameters in bfloat16."""
    network_gb_s: float = 25.0
    """A network card of 200 Gbit/s per host, sending and receiving at once."""
    latency_s: float = 0.001
    """Delay of one hop."""
    chunk_gb: float = 0.25
    """A host passes on a chunk as soon as it has all of it."""
    apply_gb_s: float = 1_700.0
    """An engine copies and verifies from its host's staged memory: 15.2 GB in about 9 ms on an H200."""
    staging_gb_s: float = 50.0
    """From the host's memory to each GPU, eight at once, each over a link of its own."""
    jitter: float = 0.05
    """Standard deviation of a host's speed."""
    stragglers: float = 0.01
    """Share of the hosts that are slow."""
    slow: float = 4.0
    """How many times slower they are."""
    detect_s: float = 10.0
    """Until a lost host is noticed: ``timeouts.heartbeat``."""
    repetitions: int = 20


class Tree:
    """Hosts in the order of a complete tree; the trainer's host is the root and host 0 its first child.

    Args:
        hosts: How many receive.
        fanout: Children of each; ``hosts`` for a flat push.
    """

    def __init__(self, hosts: int, fanout: int) -> None:
        self.children: list[list[int]] = [[] for _ in range(hosts + 1)]
        for host in range(1, hosts + 1):
            self.children[(host - 1) // fanout].append(host)


def speeds(push: Push, hosts: int, rng: random.Random) -> list[float]:
    found = []
    for _ in range(hosts + 1):
        speed = push.network_gb_s * max(0.5, rng.gauss(1, push.jitter))
        found.append(speed / push.slow if rng.random() < push.stragglers else speed)
    found[0] = push.network_gb_s
    return found


def arrivals(push: Push, tree: Tree, speed: list[float]) -> list[float]:
    """Return when each host has the last chunk: chunks flow down the tree, each host sends to its children in turn.

    An event is a chunk that has arrived at a host. A host's link sends one transfer at a time, at the slower speed of
    its two ends.
    """
    chunks = max(1, round(push.gigabytes / push.chunk_gb))
    size = push.gigabytes / chunks
    free = [0.0] * len(speed)
    last = [0.0] * len(speed)
    events = [(0.0, chunk, 0) for chunk in range(chunks)]
    while events:
        now, chunk, host = heapq.heappop(events)
        last[host] = max(last[host], now)
        for child in tree.children[host]:
            begun = max(now, free[host])
            free[host] = begun + size / min(speed[host], speed[child])
            heapq.heappush(events, (free[host] + push.latency_s, chunk, child))
    return last[1:]


def lost_host(push: Push, tree: Tree, speed: list[float], host: int) -> float:
    """Return when the last of the other hosts has the weights.

    Once the loss is noticed, the root sends everything again to the hosts below the lost one.
    """
    orphans = [host]
    for one in orphans:
        orphans += tree.children[one]
    keep = Tree(0, 1)
    keep.children = [[child for child in children if child != host] for children in tree.children]
    reached = [when for one, when in enumerate(arrivals(push, keep, speed), 1) if one not in set(orphans)]
    rest = orphans[1:]
    if not rest:
        return max(reached, default=0.0)
    again = Tree(len(rest), 2)
    late = arrivals(push, again, [speed[0], *(speed[one] for one in rest)])
    return max([*reached, push.detect_s + max(late)])


def apply_seconds(push: Push) -> float:
    return push.gigabytes / push.staging_gb_s + push.gigabytes / push.apply_gb_s


def simulate(push: Push, hosts: int, fanout: int, seed: int, *, stragglers: bool) -> float:
    """Return the median seconds until every host has applied the weights."""
    rng = random.Random(seed)
    found = []
    repetitions = push.repetitions if hosts < 1000 else 5
    for _ in range(repetitions):
        speed = speeds(push, hosts, rng) if stragglers else [push.network_gb_s] * (hosts + 1)
        found.append(max(arrivals(push, Tree(hosts, fanout), speed)) + apply_seconds(push))
        if not stragglers:
            break
    return statistics.median(found)


def simulated(push: Push, seed: int) -> None:
    print("simulated: seconds from the first byte that leaves the trainer's host until every host has applied")
    for name, value in vars(push).items():
        print(f"  input {name} = {value:g}")
    columns = ("flat", "chain", "tree of 2", "tree of 4", "tree of 2, stragglers", "tree of 2, a host lost")
    print("  hosts  engines  " + "  ".join(f"{column:>22}" for column in columns))
    for hosts in (1, 2, 4, 8, 16, 32, 64, 125, 250, 500, 1000):
        even = [push.network_gb_s] * (hosts + 1)
        row = [
            simulate(push, hosts, hosts, seed, stragglers=False),
            simulate(push, hosts, 1, seed, stragglers=False),
            simulate(push, hosts, 2, seed, stragglers=False),
            simulate(push, hosts, 4, seed, stragglers=False),
            simulate(push, hosts, 2, seed, stragglers=True),
            lost_host(push, Tree(hosts, 2), even, 1) + apply_seconds(push) if hosts > 1 else float("nan"),
        ]
        print(f"  {hosts:>5}  {8 * hosts:>7}  " + "  ".join(f"{value:>22.2f}" for value in row), flush=True)


# The run ----------------------------------------------------------------------------------------------------------


async def measured(counts: list[int]) -> None:
    model = tiny_model()
    gc.collect()
    gc.freeze()
    print("measured: CPU time, prompts of 8,000 tokens, of which all engines have seen 4,000")
    for count in counts:
        line(
            f"{count} engines: route one sample, with prefix affinity", await route(model, count, RoutingPolicy()), "us"
        )
        plain = await route(model, count, RoutingPolicy(prefix_affinity=False))
        line(f"{count} engines: route one sample, by load alone", plain, "us")
        load, health, call = await control(model, count)
        line(f"{count} engines: update one load", load, "us")
        line(f"{count} engines: one transition of one member's health", health, "us")
        line(f"{count} engines: an empty call of all members", call / 1000, "ms")
    per_block = index_bytes()
    blocks = RoutingPolicy().prefix_blocks
    line("memory of one remembered block of 32 tokens", per_block, "bytes")
    line(
        f"memory of {max(counts)} full indices of {blocks} blocks (calculated)",
        max(counts) * blocks * per_block / 1e9,
        "GB",
    )
    for holders in counts:
        line(f"{holders} holders of one engine: answer a beat, all beat together", beats(holders, together=True), "us")
        line(f"{holders} holders of one engine: answer a beat, spread out", beats(holders, together=False), "us")
    for at_a_time in (1, 32):
        cost, in_one = await frames(64_000, at_a_time)
        line(f"receive a frame, written {at_a_time} at a time, read {in_one:.1f} at a time", cost, "us")
    direct, attached = await requests(model)
    line(f"a request of {NEW_TOKENS} tokens, engine of this process", direct, "us")
    line(f"a request of {NEW_TOKENS} tokens, by a handle, both ends", attached, "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(
        f"python benchmarks/scale.py, CPU only: {platform.machine()}, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[0]:.1f} at the start"
    )
    begun = time.perf_counter()
    asyncio.run(measured(given.engines))
    simulated(Push(), given.seed)
    print(f"the run took {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
