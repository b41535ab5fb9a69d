"""Weight updates of a colocated engine on one GPU, beside one copy of the same bytes, and the engine's own ways.

    python benchmarks/gpu/weight_sync.py {sglang,vllm} [--size 7b|1.8b|moe] [--pushes 12] [--native] [--json FILE]
        [--lock FILE] [--engine-kwargs JSON]

The trainer's tensors and the engine, in its host process, are on one GPU; weights are bfloat16, at random, of a Qwen2
of 7.6 or 1.8 billion parameters, or of a Qwen3 MoE with 64 experts. Every push is verified. With ``--lock``, of the
runs that share a GPU only one measures at a time: most of the time of each is an engine that starts. In milliseconds,
medians. ``--engine-kwargs`` are more of the engine's own, such as ``{"quantization": "fp8_per_channel"}``:

- C: one device-to-device copy of the same bytes, measured before and after.
- first push: as push; the engine follows its loader and tries kernels before it pauses.
- push: from ``push()`` to its return: digests and copies on the trainer's side, then the update.
- staged update: from ``finish()`` of a transfer that was staged while the engine served on, to its return, right after
  it was staged and after a rest; and of that, how long the engine generated nothing.
- pause: what eight streams wait for longer than usual for a token, if a push comes upon them (``in_place``).
- staging: tokens of those streams while a transfer is staged, again and again, in times of those without.
- shared: the same pushes of the trainer's own tensors, which the engine reads where they are.
- sleep and wake: of weights and cache, and the push after it.
- native: the engine by itself, updated and put to sleep in its own ways (``native_updates.py``), in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import torch
from engine_fields import sglang_fields, vllm_fields
from models import SIZES, model_folder

from drivetrain import Capability, InferenceEngine, MemoryTag, PauseMode, SamplingParams, create_engine
from drivetrain.errors import DrivetrainError
from drivetrain_weight_sync import WeightSync

STREAMS: Final = 8
REST_S: Final = 0.15
"""In which processes that wait for work fall asleep."""
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS: Final = [1, 2, 4, 8]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": sglang_fields(GRAPHS, share=0.7, cache_tokens=100_000, load_format="dummy"),
    "vllm": vllm_fields(GRAPHS, share=0.05, cache_bytes=8_000_000_000, load_format="dummy"),
}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def copy_ms(nbytes: int) -> float:
    one = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(one)
    taken = []
    for _ in range(10):
        synchronize()
        begun = time.perf_counter()
        other.copy_(one)
        synchronize()
        taken.append(time.perf_counter() - begun)
    del one, other
    torch.cuda.empty_cache()
    return 1e3 * statistics.median(taken)


class Lock:
    """Held by one process at a time; without a file, by each."""

    def __init__(self, path: str = os.devnull) -> None:
        self._shared = path != os.devnull
        self._file = Path(path).open("w")

    def acquire(self) -> None:
        """Wait for it."""
        if self._shared:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let the next one have it."""
        if self._shared:
            fcntl.flock(self._file, fcntl.LOCK_UN)


async def timed(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begun)


def show(name: str, milliseconds: float, c: float) -> None:
    print(f"{name:42} {milliseconds:9.2f} ms  {milliseconds / c:6.2f} C", file=sys.stderr, flush=True)


class Streams:
    """Eight requests that are answered token by token; notes when each came."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.came: list[list[float]] = [[] for _ in range(STREAMS)]
        self._first = asyncio.Barrier(STREAMS + 1)

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(STREAMS)]
        async with asyncio.timeout(60):
            await self._first.wait()
        return self

    async def _read(self, index: int) -> None:
        params = SamplingParams(max_new_tokens=3000, ignore_eos=True, temperature=1.0, logprobs=0)
        async for _ in self._engine.generate_stream([[1 + index, 2, 3, 4]], params):
            self.came[index].append(time.perf_counter())
            if len(self.came[index]) == 1:
                await self._first.wait()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def between(self, begin: float, end: float) -> int:
        """Tokens that came then."""
        return sum(begin <= moment < end for moments in self.came for moment in moments)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens of one stream, of which the later came then."""
        return [
            1e3 * (later - earlier)
            for moments in self.came
            for earlier, later in itertools.pairwise(moments)
            if begin <= later < end
        ]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, float] = {}
    folder = model_folder(args.size)
    fields = {
        "backend": args.backend,
        "model": str(folder),
        "dtype": "bfloat16",
        "enable_sleep": True,
        "max_num_seqs": 16,
        **ENGINES[args.backend],
    }
    fields["engine_kwargs"] = fields["engine_kwargs"] | args.engine_kwargs
    async with create_engine(fields) as engine:
        print("the engine is up", file=sys.stderr, flush=True)
        await asyncio.to_thread(args.lock.acquire)
        manifest = await engine.weight_manifest()
        weights = {
            spec.name: torch.randn(spec.shape, device=DEVICE, dtype=getattr(torch, spec.dtype)).mul_(0.02)
            for spec in manifest.tensors
        }
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        await engine.generate([[1, 2, 3, 4]] * STREAMS, SamplingParams(max_new_tokens=16, ignore_eos=True))  # warms up
        c = copy_ms(nbytes)
        show(f"C: {nbytes / 1e9:.2f} GB, {len(weights)} tensors", c, c)
        async with WeightSync.connect(weights, engine, mode=PauseMode.IN_PLACE) as sync:

            def record(name: str, milliseconds: float) -> None:
                figures[name] = milliseconds
                show(name, milliseconds, c)

            async with Streams(engine) as streams:
                begun = time.perf_counter()
                first = await sync.push(version="first")
                await asyncio.sleep(0.1)
                record("first push", 1e3 * first.total_seconds)
                record("first push: update", 1e3 * first.update_seconds)
                record("first push: nothing is generated", 1e3 * first.paused_seconds)
                record("first push: longest wait of eight streams", max(streams.gaps(begun, time.perf_counter())))
            pushes = [await sync.push(version=f"push-{number}") for number in range(args.pushes)]
            record("push", 1e3 * statistics.median(result.total_seconds for result in pushes))
            record(
                "  of that: look and stage", 1e3 * statistics.median(r.check_seconds + r.stage_seconds for r in pushes)
            )
            record("  of that: update", 1e3 * statistics.median(result.update_seconds for result in pushes))
            for rest in (0.0, REST_S):
                when = f", {1e3 * rest:g} ms after that" if rest else ""
                staged: list[float] = []
                paused: list[float] = []
                for number in range(args.pushes):
                    handle = await sync.start_weight_transfer(version=f"staged-{number}-{rest:g}")
                    await handle.wait()
                    await asyncio.sleep(rest)
                    begun = time.perf_counter()
                    result = await handle.finish()
                    staged.append(1e3 * (time.perf_counter() - begun))
                    paused.append(1e3 * result.paused_seconds)
                record(f"staged update{when}", statistics.median(staged))
                record(f"  of that: nothing is generated{when}", statistics.median(paused))
            await measure_streams(engine, sync, record, args.pushes)
            await measure_sleep(engine, sync, record)
            for tensor in weights.values():
                tensor.mul_(-1.5)
            await sync.push(version="another")
            if Capability.READ_WEIGHTS in engine.capabilities:  # not of an engine that quantises
                report = await engine.check_weight_sync_integrity("another")
                print(f"integrity after all: {report}", file=sys.stderr, flush=True)
        await measure_shared(engine, weights, record, args.pushes)
        figures["C"] = c
        figures["C after"] = copy_ms(nbytes)
        versions = engine.versions
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "backend": args.backend,
        "versions": versions,
        "strategy": sync.strategy.value,
        "tensors": len(weights),
        "gb": nbytes / 1e9,
        "ms": figures,
    }


async def measure_shared(
    engine: InferenceEngine, weights: dict[str, torch.Tensor], record: Callable[[str, float], None], pushes: int
) -> None:
    async with WeightSync.connect(weights, engine, mode=PauseMode.IN_PLACE, share_tensors=True) as sync:
        record("shared: first push", await timed(sync.push(version="first of shared")))
        results = [await sync.push(version=f"shared-{number}") for number in range(pushes)]
    record("shared: push", 1e3 * statistics.median(result.total_seconds for result in results))
    record("shared:   of that: look", 1e3 * statistics.median(r.check_seconds + r.stage_seconds for r in results))
    record("shared:   of that: update", 1e3 * statistics.median(result.update_seconds for result in results))


async def measure_streams(
    engine: InferenceEngine, sync: WeightSync, record: Callable[[str, float], None], pushes: int
) -> None:
    usual: list[float] = []
    extra: list[float] = []
    for first in range(0, pushes, 4):  # streams end after a while
        async with Streams(engine) as streams:
            begun = time.perf_counter()
            await asyncio.sleep(0.5)
            usual += streams.gaps(begun, time.perf_counter())
            for number in range(first, min(first + 4, pushes)):
                handle = await sync.start_weight_transfer(version=f"stream-{number}")
                await handle.wait()
                begun = time.perf_counter()
                try:
                    await handle.finish()
                except DrivetrainError as error:
                    print(f"no update upon streams: {error}", file=sys.stderr, flush=True)
                    continue
                await asyncio.sleep(0.05)
                extra.append(max(streams.gaps(begun, time.perf_counter())))
    record("eight streams: usual time between tokens", statistics.median(usual))
    if extra:
        record("eight streams: longer for an update", statistics.median(extra) - statistics.median(usual))
    async with Streams(engine) as streams:
        begun = time.perf_counter()
        await asyncio.sleep(1.0)
        rate = streams.between(begun, time.perf_counter())
        begun, transfers = time.perf_counter(), 0
        while time.perf_counter() < begun + 1.0:
            handle = await sync.start_weight_transfer(version="never")
            await handle.wait()
            await handle.cancel()
            transfers += 1
        meanwhile = streams.between(begun, time.perf_counter()) / (time.perf_counter() - begun)
        print(
            f"{transfers} transfers staged beside eight streams: {meanwhile / rate:.3f} of their tokens",
            file=sys.stderr,
        )
        record("eight streams: ms a token, staging on and on", 1e3 * STREAMS / meanwhile)
        record("eight streams: ms a token, without", 1e3 * STREAMS / rate)


async def measure_sleep(engine: InferenceEngine, sync: WeightSync, record: Callable[[str, float], None]) -> None:
    taken: dict[str, list[float]] = {
        "sleep": [],
        "wake of the weights": [],
        "push after it": [],
        "  of that: update": [],
        "wake of the cache": [],
    }
    for number in range(4):
        taken["sleep"].append(await timed(engine.sleep([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])))
        taken["wake of the weights"].append(await timed(engine.wake_up([MemoryTag.WEIGHTS])))
        result = await sync.push(version=f"awake-{number}")
        taken["push after it"].append(1e3 * result.total_seconds)
        taken["  of that: update"].append(1e3 * result.update_seconds)
        taken["wake of the cache"].append(await timed(engine.wake_up([MemoryTag.KV_CACHE])))
    for name, times in taken.items():
        record(f"sleep: {name}", statistics.median(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--pushes", type=int, default=12)
    parser.add_argument("--native", action="store_true", help="also the engine by itself")
    parser.add_argument("--lock", type=Lock, default=Lock(), help="a file that all runs on this GPU name")
    parser.add_argument("--engine-kwargs", type=json.loads, default={}, metavar="JSON", help="more of the engine's own")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    document = asyncio.run(measure(args))
    if args.native:
        from native_updates import NATIVE

        torch.cuda.empty_cache()
        c = document["ms"]["C"]
        folder = model_folder(args.size)
        found: dict[str, float] = {}
        args.lock.release()
        for name, milliseconds in NATIVE[args.backend](folder, ENGINES[args.backend], args.lock):
            found[name] = milliseconds
            show(name, milliseconds, c)
        document["native_ms"] = found
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
