"""Measure what a fleet adds to its engines: throughput, time per request, cached prefixes, control calls.

    python benchmarks/fleet.py [--engines 1 2 4 8] [--requests 1000] [--ms-per-token 100] [--json]
    python benchmarks/fleet.py --backend transformers --engines 1 2 --requests 64

The engines are simulated in this process: each runs up to 256 requests at once, makes one token per request in a stated
time, computes 8,000 prompt tokens per second of prompts that it has not seen, and remembers the prefixes of its last
2,000,000 prompt tokens. So nothing but the fleet, the engine page and the event loop costs CPU time. The garbage
collector leaves alone what was imported (``gc.freeze``), as in a host process; a pass over torch's objects takes longer
than anything that is measured here.

- Throughput of a fleet of N, against N engines that are called directly with the same requests, in turn, in one run.
- Time added per request: the difference of the quantiles of the latencies of these two. All requests begin at once, so
  the last one has waited for the work of all; then as many clients make four requests each, one after another, and do
  not begin together.
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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


async def load(call: Callable[[int], Awaitable[object]], requests: int) -> tuple[float, list[float]]:
    """Make all calls at once; return the seconds of all and of each."""
    latencies: list[float] = []

    async def one(index: int) -> None:
        begun = time.perf_counter()
        await call(index)
        latencies.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(requests)))
    return time.perf_counter() - begun, latencies


Found = tuple[float, list[float], list[float], float]
"""Seconds of all requests at once, of each of them, and of each one of clients; CPU seconds of the first."""


async def steady(call: Callable[[int], Awaitable[object]], clients: int, seconds: float) -> list[float]:
    """Let clients that begin within ``seconds`` make four requests each; return the seconds of all but their first."""
    latencies: list[float] = []
    rng = random.Random(0)
    starts = [rng.uniform(0, seconds) for _ in range(clients)]

    async def one(index: int) -> None:
        await asyncio.sleep(starts[index])
        await call(index)
        for _ in range(3):
            begun = time.perf_counter()
            await call(index)
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(one(index) for index in range(clients)))
    return latencies


async def throughput(model: Path, count: int, requests: int, seconds: float) -> Throughput:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    rng = random.Random(count)
    prompts = [[rng.randrange(250) for _ in range(64)] for _ in range(requests)]

    async def both(call: Callable[[int], Awaitable[object]]) -> Found:
        used = time.process_time()
        took, latencies = await load(call, requests)
        used = time.process_time() - used
        return took, latencies, await steady(call, requests, TOKENS * seconds), used

    async def direct() -> Found:
        engines = [engine_of(model, seconds) for _ in range(count)]
        for engine in engines:
            await engine.start()
        found = await both(lambda index: engines[index % count].generate([prompts[index]], params))
        for engine in engines:
            await engine.teardown()
        return found

    async def through() -> Found:
        async with InferenceEngineClient([engine_of(model, seconds) for _ in range(count)]) as fleet:
            return await both(lambda index: fleet.generate([prompts[index]], params))

    directs, throughs = [], []
    for _ in range(3):
        directs.append(await direct())
        throughs.append(await through())
    fastest, fleets = min(one[0] for one in directs), min(one[0] for one in throughs)
    tokens = requests * TOKENS

    def added(of: Callable[[Found], float]) -> float:
        """Return the difference of the medians over the runs."""
        return statistics.median(map(of, throughs)) - statistics.median(map(of, directs))

    def added_ms(latencies: Callable[[Found], list[float]], quantile: int) -> float:
        return 1000 * added(lambda one: statistics.quantiles(latencies(one), n=100)[quantile - 1])

    return Throughput(
        count,
        requests,
        tokens / fastest,
        tokens / fleets,
        fastest / fleets,
        added_ms(lambda one: one[1], 50),
        added_ms(lambda one: one[1], 99),
        added_ms(lambda one: one[2], 50),
        added_ms(lambda one: one[2], 99),
        1e6 * added(lambda one: one[3]) / requests,
    )


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


async def run(counts: Sequence[int], requests: int, seconds: float) -> dict[str, list[dict[str, object]]]:
    model = tiny_model()
    gc.collect()
    gc.freeze()
    routings: list[tuple[str, Router]] = [
        ("fleet", Router(RoutingPolicy())),
        ("random", AtRandom()),
        ("round robin", InTurn()),
    ]
    found: dict[str, list[dict[str, object]]] = {"throughput": [], "replay": [], "control": []}
    for count in counts:
        found["throughput"].append(vars(await throughput(model, count, requests, seconds)))
    for name, router in routings:
        found["replay"].append(vars(await replay(model, max(counts), name, router, seconds / 10)))
    found["control"].append(vars(await control(model, max(counts), requests, seconds)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=1000, help="with --backend: for each engine")
    parser.add_argument("--ms-per-token", type=float, default=100.0)
    parser.add_argument("--backend", choices=("transformers", "sglang", "vllm", "echo"), help="measure real engines")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.backend:
        rows = asyncio.run(real(given.backend, tiny_model(), given.engines, given.requests))
        found = {"throughput": [vars(row) for row in rows]}
    else:
        found = asyncio.run(run(given.engines, given.requests, given.ms_per_token / 1000))
    if given.json:
        print(json.dumps({"arguments": vars(given), **found}, indent=1))
        return
    for name, rows in found.items():
        print(name)
        for row in rows:
            shown = [
                f"{key} {value:,.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            ]
            print("  " + ", ".join(shown))


if __name__ == "__main__":
    main()
