"""Weight updates from a trainer on GPU 0 to an engine that is elsewhere too, beside what NCCL does with those bytes.

    python benchmarks/gpu/two_gpus.py {sglang,vllm} {broadcast,mapped,tensor_parallel} [--size 7b|1.8b|moe|tiny]
        [--json FILE] [--lock FILE]

``broadcast``: to an engine on GPU 1, over NCCL. ``mapped``: to the same, which maps the memory of GPU 0.
``tensor_parallel``: to an engine on both, whose ranks do. Every push is verified, and one tensor is read back and
compared. In milliseconds, medians:

- NCCL: one broadcast of the same bytes from GPU 0 to a process on GPU 1, once the engine has ended.
- push: from ``push()`` to its return; of that the update.
- finish: of a transfer that was staged while the engine served on.
- shared: the same of the trainer's own tensors, which the engine reads where they are; not of a broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from models import SIZES, model_folder
from weight_sync import ENGINES, Lock, copy_ms, timed

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain_weight_sync import WeightSync

ON_GPU_1: Final[dict[str, dict[str, Any]]] = {
    "sglang": {"engine_kwargs": {"base_gpu_id": 1}},
    "vllm": {"device": "cuda:1"},
}
REPEATS: Final = 6


def nccl_ms(nbytes: int) -> float:
    """Median of broadcasts of so many bytes to another process on GPU 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=_broadcasts, args=(1, port, nbytes))
    other.start()
    taken = _broadcasts(0, port, nbytes)
    other.join()
    torch.cuda.empty_cache()
    return 1e3 * statistics.median(taken[1:])


def _broadcasts(rank: int, port: int, nbytes: int) -> list[float]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, device_id=device
    )
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(REPEATS):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        torch.distributed.broadcast(tensor, 0)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    torch.distributed.destroy_process_group()
    return taken


def fields_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    fields = {"backend": args.backend, "model": str(folder), "dtype": "bfloat16", **ENGINES[args.backend]}
    if args.way == "tensor_parallel":
        return fields | {"tensor_parallel_size": 2}
    there = ON_GPU_1[args.backend]
    return {**fields, **there, "engine_kwargs": fields["engine_kwargs"] | there.get("engine_kwargs", {})}


async def holds(engine: InferenceEngine, name: str, tensor: torch.Tensor) -> bool:
    """Return whether the engine's tensor equals the trainer's bit for bit."""
    read = await engine.get_weights_by_name(name)
    return read.data == tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_folder(args.size)
    async with create_engine(fields_of(args, folder)) as engine:
        print("the engine is up", file=sys.stderr, flush=True)
        await asyncio.to_thread(args.lock.acquire)
        manifest = await engine.weight_manifest()
        weights = {
            spec.name: torch.randn(spec.shape, device="cuda:0", dtype=getattr(torch, spec.dtype)).mul_(0.02)
            for spec in manifest.tensors
        }
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        strategy = "broadcast" if args.way == "broadcast" else "cuda_ipc"
        figures: dict[str, float] = {}
        equal = True
        for shared in (False,) if args.way == "broadcast" else (False, True):
            async with WeightSync.connect(
                weights, engine, strategy, group_backend="nccl", share_tensors=shared
            ) as sync:
                figures |= {
                    f"{'shared: ' * shared}{name}": taken for name, taken in (await pushed(sync, args.pushes)).items()
                }
                name = max(weights, key=lambda name: weights[name].nbytes)
                equal = equal and await holds(engine, name, weights[name])
                await engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=4))
            for tensor in weights.values():
                tensor.mul_(-1.5)
        figures["C"] = copy_ms(nbytes)
        versions = engine.versions
        weights.clear()
    return {
        "device": f"2 x {torch.cuda.get_device_name(0)}",
        "backend": args.backend,
        "way": args.way,
        "versions": versions,
        "gb": nbytes / 1e9,
        "tensor_equal": equal,
        "ms": figures,
    }


async def pushed(sync: WeightSync, pushes: int) -> dict[str, float]:
    """Medians of so many pushes, and of as many transfers that are finished once they are staged."""
    await sync.push(version="first")
    results = [await sync.push(version=f"push-{number}") for number in range(pushes)]
    finished = []
    for number in range(pushes):
        handle = await sync.start_weight_transfer(version=f"staged-{number}")
        await handle.wait()
        finished.append(await timed(handle.finish()))
    return {
        "push": 1e3 * statistics.median(result.total_seconds for result in results),
        "update": 1e3 * statistics.median(result.update_seconds for result in results),
        "finish": statistics.median(finished),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("way", choices=["broadcast", "mapped", "tensor_parallel"])
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--lock", type=Lock, default=Lock(), help="a file that all runs on these GPUs name")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")  # the trainer is on one of them
    document = asyncio.run(measure(args))
    figures = document["ms"]
    figures["NCCL"] = nccl_ms(round(document["gb"] * 1e9))
    for name, milliseconds in figures.items():
        ratio = figures["NCCL"] / milliseconds
        print(f"{name:16} {milliseconds:9.2f} ms  {ratio:6.2f} of NCCL's rate", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
