"""A fleet of an engine on each of two GPUs, with the trainer on the first: pushes to both, and requests to both.

    python benchmarks/gpu/fleet.py {sglang,vllm} [--size 7b|1.8b|tiny] [--gpus 0 1] [--pushes 6] [--requests 64]
        [--tokens 128] [--json FILE]

Every push is verified by every engine, and the largest tensor is read back from both and compared. In milliseconds,
medians:

- push to engine-0, to engine-1: of the trainer's weights to one engine that is in no fleet, by CUDA IPC.
- push to both: to the fleet, beside the slower of these two; and the same of the trainer's own tensors (``shared``).
- finish: of a transfer to both that was staged while they served on.
- sleep, wake of the weights, push after it, wake of the cache: of both.
- NCCL: a broadcast to a fleet of the second engine alone, because NCCL takes one rank of each GPU, and the trainer has
  the first; beside it one broadcast of the same bytes to a process on that GPU, once the engines have ended. Left out
  with ``--gpus 0 0``, where both engines are on the trainer's GPU.

Throughput in tokens per second, logprobs on, the best of three rounds: of each engine alone, of both called directly at
the same time, of both through the fleet, and of both through a fleet of their handles without ``exact_failover``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from engine_fields import sglang_fields, vllm_fields
from models import SIZES, model_folder
from two_gpus import ON_GPU_1, holds, nccl_ms, pushed
from weight_sync import copy_ms, timed

from drivetrain import InferenceEngine, MemoryTag, SamplingParams, attach, create_engine
from drivetrain.errors import DrivetrainError
from drivetrain_fleet import InferenceEngineClient
from drivetrain_weight_sync import WeightSync

GRAPHS: Final = [1, 2, 4, 8, 16, 32, 64]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": sglang_fields(GRAPHS, share=0.7, cache_tokens=40_000, load_format="dummy"),
    "vllm": vllm_fields(GRAPHS, share=0.05, cache_bytes=4_000_000_000, load_format="dummy"),
}
ROUNDS: Final = 3
BROADCAST: Final[dict[str, Any]] = {"strategy": "broadcast", "group_backend": "nccl"}
ARENA: Final[dict[str, Any]] = {"strategy": "cuda_ipc"}
SHARED: Final[dict[str, Any]] = {"strategy": "cuda_ipc", "share_tensors": True}

Weights = dict[str, torch.Tensor]


def fields_of(backend: str, folder: Path, gpu: int) -> dict[str, Any]:
    """Return the fields of an engine on one of the two GPUs."""
    fields = {
        "backend": backend,
        "model": str(folder),
        "dtype": "bfloat16",
        "enable_sleep": True,
        "max_num_seqs": 64,
        **ENGINES[backend],
    }
    there = ON_GPU_1[backend] if gpu == 1 else {}
    return {**fields, **there, "engine_kwargs": fields["engine_kwargs"] | there.get("engine_kwargs", {})}


# Pushes ----------------------------------------------------------------------------------------------------------


async def push_to(engine: InferenceEngine, weights: Weights, pushes: int, **how: Any) -> dict[str, float]:
    """Push so many times; return medians."""
    async with WeightSync.connect(weights, engine, **how) as sync:
        return await pushed(sync, pushes)


async def sleep_and_push(fleet: InferenceEngine, weights: Weights) -> dict[str, float]:
    """Let the fleet sleep and wake around a push; return medians of all rounds but the first."""
    taken: dict[str, list[float]] = {
        "sleep": [],
        "wake of the weights": [],
        "push after it": [],
        "wake of the cache": [],
    }
    async with WeightSync.connect(weights, fleet, **SHARED) as sync:
        for number in range(4):
            taken["sleep"].append(await timed(fleet.sleep()))
            taken["wake of the weights"].append(await timed(fleet.wake_up([MemoryTag.WEIGHTS])))
            taken["push after it"].append(await timed(sync.push(version=f"awake-{number}")))
            taken["wake of the cache"].append(await timed(fleet.wake_up()))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


async def equal_on_all(engines: Sequence[InferenceEngine], weights: Weights) -> bool:
    """Return whether every engine's largest tensor is the trainer's, bit for bit."""
    name = max(weights, key=lambda name: weights[name].nbytes)
    return all([await holds(engine, name, weights[name]) for engine in engines])


async def refusal(call: Awaitable[object]) -> str:
    """Make a call that must be refused; return its error, and the seconds that the call took."""
    begun = time.perf_counter()
    try:
        await call
    except DrivetrainError as error:
        return f"{type(error).__name__} after {time.perf_counter() - begun:.1f} s: {str(error)[:300]}"
    return "not refused"


# Requests --------------------------------------------------------------------------------------------------------


async def tokens_per_s(call: Callable[[int], Awaitable[object]], requests: int, tokens: int) -> float:
    begun = time.perf_counter()
    await asyncio.gather(*(call(index) for index in range(requests)))
    return requests * tokens / (time.perf_counter() - begun)


async def throughput(
    engines: Sequence[InferenceEngine], fleet: InferenceEngine, loose: InferenceEngine, requests: int, tokens: int
) -> dict[str, float]:
    """Measure every way in turn, and keep the best round of each."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0)
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range(64)] for _ in range(2 * requests)]
    ways: dict[str, tuple[Callable[[int], Awaitable[object]], int]] = {
        "engine-0 alone": (lambda index: engines[0].generate([prompts[index]], params), requests),
        "engine-1 alone": (lambda index: engines[1].generate([prompts[index]], params), requests),
        "both directly": (lambda index: engines[index % 2].generate([prompts[index]], params), 2 * requests),
        "fleet": (lambda index: fleet.generate([prompts[index]], params), 2 * requests),
        "fleet of handles, exact_failover=False": (
            lambda index: loose.generate([prompts[index]], params),
            2 * requests,
        ),
    }
    best = dict.fromkeys(ways, 0.0)
    for number in range(ROUNDS + 1):  # the first one warms up
        for name, (call, count) in ways.items():
            await fleet.reset_prefix_cache()
            found = await tokens_per_s(call, count, tokens)
            if number:
                best[name] = max(best[name], found)
    return best


# The run ---------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_folder(args.size)
    engines = [create_engine(fields_of(args.backend, folder, gpu)) for gpu in args.gpus]
    await asyncio.gather(*(engine.start() for engine in engines))
    print("the engines are up", file=sys.stderr, flush=True)
    manifest = await engines[0].weight_manifest()
    weights = {
        spec.name: torch.randn(spec.shape, device="cuda:0", dtype=getattr(torch, spec.dtype)).mul_(0.02)
        for spec in manifest.tensors
    }
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    found: dict[str, Any] = {}
    figures: dict[str, float] = {"C": copy_ms(nbytes)}

    def record(prefix: str, medians: dict[str, float]) -> None:
        for name, milliseconds in medians.items():
            figures[f"{prefix}{name}"] = milliseconds
            print(f"{prefix}{name:24} {milliseconds:9.2f} ms", file=sys.stderr, flush=True)

    async with InferenceEngineClient(engines) as fleet:
        held = [await attach(await engine.handle()) for engine in engines]
        async with InferenceEngineClient(held, exact_failover=False) as loose:
            found["tokens_per_s"] = await throughput(engines, fleet, loose, args.requests, args.tokens)
        print(found["tokens_per_s"], file=sys.stderr, flush=True)
        record("both: ", await push_to(fleet, weights, args.pushes, **ARENA))
        found["equal"] = await equal_on_all(engines, weights)
        for tensor in weights.values():
            tensor.mul_(-1.5)
        record("both, shared: ", await push_to(fleet, weights, args.pushes, **SHARED))
        found["equal, shared"] = await equal_on_all(engines, weights)
        print("asleep and awake", file=sys.stderr, flush=True)
        record("both, asleep: ", await sleep_and_push(fleet, weights))
        found["members"] = [f"{one.name}: {one.health.value} {one.version}" for one in fleet.members]
        duplicate = WeightSync.connect(weights, fleet, **BROADCAST)
        found["NCCL with two ranks on one GPU"] = await refusal(duplicate.push(version="never"))
        await duplicate.close()
        record("both, after the refusal: ", await push_to(fleet, weights, 1, **SHARED))
        alone = await fleet.remove("engine-0")
        if args.gpus[1]:
            for tensor in weights.values():
                tensor.mul_(-1.5)
            record("engine-1, NCCL: ", await push_to(fleet, weights, args.pushes, **BROADCAST))
            found["equal, NCCL"] = await equal_on_all(engines[1:], weights)
        record("engine-0: ", await push_to(alone, weights, args.pushes, **ARENA))
        record("engine-0, shared: ", await push_to(alone, weights, args.pushes, **SHARED))
        record("engine-1: ", await push_to(fleet, weights, args.pushes, **ARENA))
        record("engine-1, shared: ", await push_to(fleet, weights, args.pushes, **SHARED))
        versions = fleet.versions
        weights.clear()
        await alone.teardown()
    torch.cuda.empty_cache()
    if args.gpus[1]:
        record("", {"NCCL": nccl_ms(nbytes)})
    slower = max(figures["engine-0: push"], figures["engine-1: push"])
    found["push to both, of the slower single one"] = figures["both: push"] / slower
    return {
        "device": f"2 x {torch.cuda.get_device_name(0)}",
        "backend": args.backend,
        "versions": versions,
        "gb": nbytes / 1e9,
        **found,
        "ms": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--gpus", type=int, nargs=2, choices=(0, 1), default=[0, 1], help="of the two engines")
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--requests", type=int, default=64, help="for each engine, all at once")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")  # the trainer is on one of them
    document = asyncio.run(measure(args))
    text = json.dumps(document, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
