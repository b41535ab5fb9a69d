"""Sleep and wake by drivetrain beside the engine's own, in turn, of two engines that are up at once on one GPU.

    python benchmarks/gpu/sleep.py {sglang,vllm} [--size 7b|1.8b] [--rounds 12] [--json FILE]

Weights and cache sleep together, then the weights wake, then the cache. A round is one such cycle of each engine, then
one of drivetrain's with a push between the two wakes, as in a training step. Weights are random, in bfloat16. Times are
medians in milliseconds, with their middle half; drivetrain's extra time is the median over rounds of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from models import SIZES, model_folder
from native_updates import sglang_engine, sglang_sleeps, vllm_engine, vllm_sleeps
from weight_sync import DEVICE, ENGINES

from drivetrain import InferenceEngine, MemoryTag, create_engine
from drivetrain_weight_sync import WeightSync

NATIVE: Final = {"sglang": (sglang_engine, sglang_sleeps), "vllm": (vllm_engine, vllm_sleeps)}
STARTS_WITHIN: Final = 300.0
BOTH: Final = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]

Cycle = dict[str, float]
"""Milliseconds of each step."""


def serve_native(backend: str, folder: Path, asked: Connection) -> None:
    """In a process of its own: start the engine by itself, and run a cycle each time that one is asked for."""
    start, steps_of = NATIVE[backend]
    steps = steps_of(start(folder, ENGINES[backend]))
    asked.send(None)
    while asked.recv():
        cycle: Cycle = {}
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            cycle[name] = 1e3 * (time.perf_counter() - begun)
        asked.send(cycle)


async def timed(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begun)


async def cycle_of(engine: InferenceEngine, sync: WeightSync | None, version: str) -> Cycle:
    """Time one sleep and wake through drivetrain, with a push between the wakes if ``sync`` is given."""
    cycle = {
        "sleep": await timed(engine.sleep(BOTH)),
        "wake of the weights": await timed(engine.wake_up([MemoryTag.WEIGHTS])),
    }
    if sync is not None:
        begun = time.perf_counter()
        result = await sync.push(version=version)
        cycle["push"] = 1e3 * (time.perf_counter() - begun)
        cycle["  of that: update"] = 1e3 * result.update_seconds
    cycle["wake of the cache"] = await timed(engine.wake_up([MemoryTag.KV_CACHE]))
    return cycle


def total(cycle: Cycle) -> float:
    return cycle["sleep"] + cycle["wake of the weights"] + cycle["wake of the cache"]


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower quartile": low, "upper quartile": high}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_folder(args.size)
    here, there = multiprocessing.Pipe()
    # Spawned: an engine that starts in a fork of this process would find CUDA in use. No daemon: it starts processes.
    native = multiprocessing.get_context("spawn").Process(target=serve_native, args=(args.backend, folder, there))
    native.start()
    fields = {
        "backend": args.backend,
        "model": str(folder),
        "dtype": "bfloat16",
        "enable_sleep": True,
        "max_num_seqs": 16,
        **ENGINES[args.backend],
    }
    kinds = ("native", "drivetrain", "drivetrain, with a push")
    cycles: dict[str, list[Cycle]] = {kind: [] for kind in kinds}
    try:
        async with create_engine(fields) as engine:
            print("drivetrain's is up", file=sys.stderr, flush=True)
            manifest = await engine.weight_manifest()
            weights = {
                spec.name: torch.randn(spec.shape, device=DEVICE, dtype=getattr(torch, spec.dtype)).mul_(0.02)
                for spec in manifest.tensors
            }
            if not await asyncio.to_thread(here.poll, STARTS_WITHIN):
                raise TimeoutError(f"the engine by itself did not start within {STARTS_WITHIN:g} s")
            here.recv()
            print("the engine by itself is up", file=sys.stderr, flush=True)
            async with WeightSync.connect(weights, engine) as sync:
                await sync.push(version="first")
                for number in range(args.rounds + 1):
                    here.send(True)
                    own: Cycle = await asyncio.to_thread(here.recv)
                    bare = await cycle_of(engine, None, "")
                    pushed = await cycle_of(engine, sync, f"step-{number}")
                    print(*(f"{total(cycle):.1f} ms" for cycle in (own, bare, pushed)), file=sys.stderr, flush=True)
                    if number:  # the first warms up
                        for kind, cycle in zip(kinds, (own, bare, pushed), strict=True):
                            cycles[kind].append(cycle)
            versions = engine.versions
        here.send(False)
    finally:
        native.terminate()
    figures = {
        kind: {name: spread([cycle[name] for cycle in some]) for name in some[0]} | {"all": spread([*map(total, some)])}
        for kind, some in cycles.items()
    }
    longer = {
        kind: spread([total(one) - total(own) for one, own in zip(some, cycles["native"], strict=True)])
        for kind, some in cycles.items()
        if kind != "native"
    }
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "backend": args.backend,
        "versions": versions,
        "rounds": args.rounds,
        "gb": sum(tensor.nbytes for tensor in weights.values()) / 1e9,
        "ms": figures,
        "longer than the engine's own, ms": longer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(NATIVE))
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    document = json.dumps(asyncio.run(measure(args)), indent=1)
    print(document)
    if args.json:
        args.json.write_text(document + "\n")


if __name__ == "__main__":
    main()
