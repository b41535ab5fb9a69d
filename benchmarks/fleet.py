"""Measure what a fleet adds to its engines: throughput, time per request, cached prefixes, control calls.

    python benchmarks/fleet.py [--engines 1 2 4 8] [--requests 1000] [--ms-per-token 100] [--json]
    python benchmarks/fleet.py --backend transformers --engines 1 2 --requests 64

The engines are simulated in this process: each runs up to 256 requests at once, makes one token per request in a stated
time, computes 8,000 prompt tokens per second of prompts that it has not seen, and remembers the prefixes of its last
2,000,000 prompt tokens. So nothing but the fleet, the engine page and the event loop costs CPU time. The garbage
collector leaves alone what was imported (``gc.freeze``), as in a host process; a pass over torch's objects takes longer
than anything that is measured here.

Throughput and times are those of a clock that counts CPU time and skips waits (``cpu_clock.py``), so other work on the
machine does not count.

- Throughput of a fleet of N, against N engines that are called directly with the same requests, in turn, in one run.
- Time added per request: the difference of the quantiles of the latencies of these two. All requests begin at once, so
  the last one has waited for the work of all; then as many clients make four requests each, one after another, and do
  not begin together ("steady").
- Steady latencies above the engine's own time, called directly and through the fleet, without the garbage collector
  and with it. A pass of the collector looks at every object of 1,000 requests: whichever request ends then waits for
  it, also at an engine that is called directly. Passes are counted, and their share of the time that clients wait.
- CPU time added per request of 32 tokens.
- Share of prompt tokens that were cached, in a replay of sessions of 43 turns with a shared system prompt; two of five
  sessions fork a sub-agent half-way. The same replay routed at random and round robin.
- Seconds of a pause and of going on with that many requests in flight.

With --backend, the engines are real ones with a tiny model, each in a host process on the CPU. Only their throughput is
measured: N engines through a fleet, against the same N engines called directly, and against N times one engine. More
engines than cores share the cores, so such a row says nothing about the fleet; it is marked ``shares_cores``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cpu_clock import CollectorPasses, CpuClockLoop
from simulated import SimulatedBackend, simulated_engine

from drivetrain import Capability, InferenceEngine, SamplingParams, create_engine
from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain_fleet import InferenceEngineClient, RoutingPolicy
from drivetrain_fleet.backend import FleetBackend
from drivetrain_fleet.prefix_index import BLOCK, Blocks, PrefixIndex
from drivetrain_fleet.routing import Load, Router, Work

AT_ONCE = 256
PREFILL_PER_S = 8_000
CACHED_TOKENS = 2_000_000
TOKENS = 32
ROUNDS = 3
PARTS = ("throughput", "replay", "control")


class TimedBackend(SimulatedBackend):
    """Makes tokens in a stated time, of a bounded number of requests at once."""

    claimed = frozenset(
        {
            Capability.STREAMING,
            Capability.ABORT,
            Capability.IGNORE_EOS,
            Capability.PAUSE_ABORT,
            Capability.PAUSE_WAIT,
            Capability.PAUSE_IN_PLACE,
            Capability.PAUSE_RETRACT,
            Capability.PREFIX_CACHE,
            Capability.SESSIONS,
            Capability.VERSION_SPANS,
        }
    )

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        super().__init__(config, seconds)
        self.cache = PrefixIndex(CACHED_TOKENS // BLOCK)
        self.room = asyncio.Semaphore(AT_ONCE)
        self.going = asyncio.Event()
        self.going.set()
        self.prompt_tokens = self.cached_tokens = 0

    async def freeze(self, mode: PauseMode) -> None:
        self.going.clear()

    async def unfreeze(self) -> None:
        self.going.set()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with self.room:
            self.running += 1
            try:
                blocks = Blocks.of(request.prompt_token_ids)
                cached = self.cache.matched(blocks)
                self.cache.add(blocks)
                new = len(request.prompt_token_ids) - cached
                self.prompt_tokens += len(request.prompt_token_ids)
                self.cached_tokens += cached
                made: list[int] = []
                due = asyncio.get_running_loop().time() + new / PREFILL_PER_S
                for index in range(request.max_new_tokens):
                    due += self.seconds
                    await asyncio.sleep(due - asyncio.get_running_loop().time())
                    await self.going.wait()
                    made.append((request.prompt_token_ids[-1] + index) % 250)
                    yield TokenDelta([made[-1]])
                self.cache.add(blocks.followed_by(made))
                spans = [VersionSpan(self.config.weight_version, 0, len(made))]
                result = GenerateResult(made, FinishReason.LENGTH, spans, cached_tokens=cached)
                yield TokenDelta([], result=result)
            finally:
                self.running -= 1


def engine_of(model: Path, seconds: float) -> InferenceEngine:
    return simulated_engine(TimedBackend, model, seconds)


def timed(engine: InferenceEngine) -> TimedBackend:
    backend = engine.parts.backend
    assert isinstance(backend, TimedBackend)
    return backend


# Throughput and time per request ----------------------------------------------------------------------------------


@dataclass
class Steady:
    """Milliseconds of a request above its engine's own time, medians over the rounds; and passes of the collector."""

    p50_ms: float
    p99_ms: float
    collected_p50_ms: float
    collected_p99_ms: float
    passes: float
    longest_pass_ms: float
    passes_share: float


@dataclass
class Throughput:
    engines: int
    requests: int
    direct_tokens_per_s: float
    fleet_tokens_per_s: float
    ratio: float
    added_p50_ms: float
    added_p99_ms: float
    steady_added_p50_ms: float
    steady_added_p99_ms: float
    added_cpu_us_per_request: float
    direct: Steady
    fleet: Steady


@dataclass
class Found:
    """One round."""

    seconds: float
    """Seconds for all requests at once."""
    latencies: list[float]
    """Seconds of each of them."""
    cpu_seconds: float
    """CPU seconds for all of them."""
    steady: list[float]
    """Latencies of clients, without the garbage collector."""
    collected: list[float]
    """The same, with it."""
    collected_seconds: float
    passes: list[float]
    """Seconds of each pass of the collector meanwhile."""


Call = Callable[[int], Awaitable[object]]


async def load(call: Call, requests: int) -> tuple[float, list[float]]:
    """Make all calls at once; return the seconds of all and of each."""
    latencies: list[float] = []
    clock = asyncio.get_running_loop().time

    async def one(index: int) -> None:
        begun = clock()
        await call(index)
        latencies.append(clock() - begun)

    begun = clock()
    await asyncio.gather(*(one(index) for index in range(requests)))
    return clock() - begun, latencies


async def steady(call: Call, clients: int, seconds: float) -> list[float]:
    """Let clients that begin within ``seconds`` make four requests each; return the seconds of all but their first."""
    latencies: list[float] = []
    clock = asyncio.get_running_loop().time
    rng = random.Random(0)
    starts = [rng.uniform(0, seconds) for _ in range(clients)]

    async def one(index: int) -> None:
        await asyncio.sleep(starts[index])
        await call(index)
        for _ in range(3):
            begun = clock()
            await call(index)
            latencies.append(clock() - begun)

    await asyncio.gather(*(one(index) for index in range(clients)))
    return latencies


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector make no pass within, and a full one before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def measured(call: Call, requests: int, seconds: float) -> Found:
    """Make one round; ``seconds`` is the time for a token."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CpuClockLoop)
    passes = CollectorPasses()
    with loop.clock.counting():
        with uncollected():
            used = time.thread_time()
            took, latencies = await load(call, requests)
            used = time.thread_time() - used
        with uncollected():
            without = await steady(call, requests, TOKENS * seconds)
        gc.collect()
        begun = loop.time()
        with passes.watched():
            collected = await steady(call, requests, TOKENS * seconds)
        return Found(took, latencies, used, without, collected, loop.time() - begun, passes.seconds)


async def throughput(model: Path, count: int, requests: int, seconds: float) -> Throughput:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    rng = random.Random(count)
    prompts = [[rng.randrange(250) for _ in range(64)] for _ in range(requests)]

    async def direct() -> Found:
        engines = [engine_of(model, seconds) for _ in range(count)]
        for engine in engines:
            await engine.start()
        found = await measured(
            lambda index: engines[index % count].generate([prompts[index]], params), requests, seconds
        )
        for engine in engines:
            await engine.teardown()
        return found

    async def through() -> Found:
        async with InferenceEngineClient([engine_of(model, seconds) for _ in range(count)]) as fleet:
            return await measured(lambda index: fleet.generate([prompts[index]], params), requests, seconds)

    directs: list[Found] = []
    throughs: list[Found] = []
    for _ in range(ROUNDS):
        directs.append(await direct())
        throughs.append(await through())
    fastest, fleets = min(one.seconds for one in directs), min(one.seconds for one in throughs)
    tokens = requests * TOKENS

    def added(of: Callable[[Found], float]) -> float:
        """Return the difference of the medians over the rounds."""
        return statistics.median(map(of, throughs)) - statistics.median(map(of, directs))

    def summed_up(rounds: Sequence[Found]) -> Steady:
        def median(of: Callable[[Found], float]) -> float:
            return statistics.median(map(of, rounds))

        def above_ms(latencies: Callable[[Found], list[float]], percentile: int) -> float:
            return median(lambda one: quantile_ms(latencies(one), percentile) - 1000 * TOKENS * seconds)

        return Steady(
            above_ms(lambda one: one.steady, 50),
            above_ms(lambda one: one.steady, 99),
            above_ms(lambda one: one.collected, 50),
            above_ms(lambda one: one.collected, 99),
            median(lambda one: len(one.passes)),
            median(lambda one: 1000 * max(one.passes, default=0.0)),
            median(lambda one: sum(one.passes) / one.collected_seconds),
        )

    of_direct, of_fleet = summed_up(directs), summed_up(throughs)
    return Throughput(
        count,
        requests,
        tokens / fastest,
        tokens / fleets,
        fastest / fleets,
        added(lambda one: quantile_ms(one.latencies, 50)),
        added(lambda one: quantile_ms(one.latencies, 99)),
        of_fleet.p50_ms - of_direct.p50_ms,
        of_fleet.p99_ms - of_direct.p99_ms,
        1e6 * added(lambda one: one.cpu_seconds) / requests,
        of_direct,
        of_fleet,
    )


def quantile_ms(seconds: Sequence[float], percentile: int) -> float:
    return 1000 * statistics.quantiles(seconds, n=100)[percentile - 1]


@dataclass
class RealThroughput:
    backend: str
    engines: int
    requests: int
    direct_tokens_per_s: float
    fleet_tokens_per_s: float
    ratio: float
    """Throughput of the fleet, divided by that of the same engines called directly."""
    of_singles: float
    """Throughput of the fleet, divided by N times that of one engine called directly."""
    shares_cores: bool


async def real(backend: str, model: Path, counts: Sequence[int], requests: int) -> list[RealThroughput]:
    """Measure fleets of real engines; each number is the best of three rounds, direct and fleet in turn."""
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    rng = random.Random(0)
    rows: list[RealThroughput] = []
    single = 0.0
    for count in sorted({1, *counts}):
        engines = [create_engine(backend, model=str(model), isolation="process") for _ in range(count)]
        total = requests * count
        prompts = [[rng.randrange(250) for _ in range(64)] for _ in range(total)]
        directs, throughs = [], []
        async with InferenceEngineClient(engines) as fleet:

            def direct(index: int) -> Awaitable[object]:
                return engines[index % count].generate([prompts[index]], params)  # noqa: B023

            def through(index: int) -> Awaitable[object]:
                return fleet.generate([prompts[index]], params)  # noqa: B023

            await load(direct, count)
            for _ in range(3):
                for call, found in ((direct, directs), (through, throughs)):
                    await fleet.reset_prefix_cache()
                    found.append((await load(call, total))[0])
        fastest, fleets = (total * TOKENS / min(found) for found in (directs, throughs))
        single = single or fastest
        shares = count > (os.cpu_count() or 1)
        rows.append(
            RealThroughput(backend, count, total, fastest, fleets, fleets / fastest, fleets / (count * single), shares)
        )
    return rows


# Cached prefixes --------------------------------------------------------------------------------------------------


@dataclass
class AtRandom(Router):
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def choose(self, work: Work, loads: Mapping[str, Load]) -> str | None:
        return self.rng.choice(sorted(loads)) if loads else None


@dataclass
class InTurn(Router):
    turn: int = 0

    def choose(self, work: Work, loads: Mapping[str, Load]) -> str | None:
        self.turn += 1
        return sorted(loads)[self.turn % len(loads)] if loads else None


@dataclass
class Replay:
    routing: str
    engines: int
    cached: float
    seconds: float


async def replay(model: Path, count: int, name: str, router: Router, seconds: float) -> Replay:
    """Replay sessions of 43 turns; two of five fork a sub-agent that begins with half of the conversation."""
    engines = [engine_of(model, seconds) for _ in range(count)]
    async with InferenceEngineClient(engines) as fleet:
        backend = fleet.parts.backend
        assert isinstance(backend, FleetBackend)
        backend.sending.router = router
        params = SamplingParams(max_new_tokens=16, ignore_eos=True)
        system = [7] * 2_000

        async def converse(number: int, text: list[int], turns: int) -> None:
            rng = random.Random(number)
            forks = []
            for turn in range(turns):
                output = await fleet.generate([text], params)
                seen = [rng.randrange(250) for _ in range(300)]  # what a tool answers
                text = text + output.completions[0].token_ids + seen
                if turns == 43 and turn == 20 and number % 5 < 2:
                    forks.append(asyncio.create_task(converse(1000 + number, text, 8)))
            await asyncio.gather(*forks)

        begun = time.perf_counter()
        firsts = [random.Random(-number - 1) for number in range(40)]
        prompts = [system + [rng.randrange(250) for _ in range(500)] for rng in firsts]
        await asyncio.gather(*(converse(number, prompt, 43) for number, prompt in enumerate(prompts)))
        took = time.perf_counter() - begun
        found = [timed(engine) for engine in engines]
        cached = sum(one.cached_tokens for one in found) / sum(one.prompt_tokens for one in found)
        return Replay(name, count, cached, took)


# Control ----------------------------------------------------------------------------------------------------------


@dataclass
class Control:
    engines: int
    in_flight: int
    pause_ms: float
    continue_ms: float


async def control(model: Path, count: int, requests: int, seconds: float) -> Control:
    async with InferenceEngineClient([engine_of(model, seconds) for _ in range(count)]) as fleet:
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        task = asyncio.create_task(fleet.generate([[index % 250] for index in range(requests)], params))
        await asyncio.sleep(1.0)
        pauses, goes = [], []
        for _ in range(5):
            begun = time.perf_counter()
            await fleet.pause_generation("in_place")
            paused = time.perf_counter()
            await fleet.continue_generation()
            goes.append(time.perf_counter() - paused)
            pauses.append(paused - begun)
            await asyncio.sleep(0.1)
        await task
    return Control(count, requests, 1000 * statistics.median(pauses), 1000 * statistics.median(goes))


# The run ----------------------------------------------------------------------------------------------------------


async def run(
    counts: Sequence[int], requests: int, seconds: float, only: Sequence[str]
) -> dict[str, list[dict[str, object]]]:
    model = tiny_model()
    gc.collect()
    gc.freeze()
    routings: list[tuple[str, Router]] = [
        ("fleet", Router(RoutingPolicy())),
        ("random", AtRandom()),
        ("round robin", InTurn()),
    ]
    found: dict[str, list[dict[str, object]]] = {name: [] for name in only}
    if "throughput" in only:
        for count in counts:
            found["throughput"].append(asdict(await throughput(model, count, requests, seconds)))
    if "replay" in only:
        for name, router in routings:
            found["replay"].append(asdict(await replay(model, max(counts), name, router, seconds / 10)))
    if "control" in only:
        found["control"].append(asdict(await control(model, max(counts), requests, seconds)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=1000, help="with --backend: for each engine")
    parser.add_argument("--ms-per-token", type=float, default=100.0)
    parser.add_argument("--backend", choices=("transformers", "sglang", "vllm", "echo"), help="measure real engines")
    parser.add_argument("--only", action="append", choices=PARTS, help="what is measured; repeatable; default: all")
    parser.add_argument("--gc-threshold", type=int, nargs=3, help="as for gc.set_threshold; default: Python's")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.gc_threshold:
        gc.set_threshold(*given.gc_threshold)
    if given.backend:
        rows = asyncio.run(real(given.backend, tiny_model(), given.engines, given.requests))
        found = {"throughput": [asdict(row) for row in rows]}
    else:
        with asyncio.Runner(loop_factory=CpuClockLoop) as runner:
            found = runner.run(run(given.engines, given.requests, given.ms_per_token / 1000, given.only or PARTS))
    if given.json:
        print(json.dumps({"arguments": vars(given), **found}, indent=1))
        return
    for name, lines in found.items():
        print(name)
        for row in lines:
            print("  " + ", ".join(shown(row)))


def shown(row: Mapping[str, object], of: str = "") -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from shown(value, f"{key} ")
        else:
            yield f"{of}{key} {value:,.3f}" if isinstance(value, float) else f"{of}{key} {value}"


if __name__ == "__main__":
    main()
