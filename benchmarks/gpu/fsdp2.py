"""Weight updates from an FSDP2 trainer on two GPUs, beside a full gather of the same tensors by torch.

    python benchmarks/gpu/fsdp2.py {vllm,sglang,transformers} [--size 7b|1.8b|tiny] [--tensor-parallel]
        [--strategy auto] [--json FILE]

Two ranks hold a bfloat16 model at random, sharded by ``fully_shard``; rank 0 pushes to an engine on GPU 1, or with
``--tensor-parallel`` to one whose two ranks are on both GPUs. Every push is verified, and one tensor is read back and
compared. In milliseconds, medians:

- full gather: ``full_tensor()`` of every parameter on both ranks, one at a time, each dropped at once.
- copy of a rank's shards: of as many bytes as a rank holds, from GPU 0 to GPU 1, by torch in one call.
- push: from ``push()`` to its return on rank 0; of that gathering, checks and staging, and the update.
- first push: the same, including the forming of groups and the recording of the loader.

``peak`` is the most memory that torch allocated on GPU 0 during the pushes beyond the shards, in GB; ``in use`` is how
much more of that GPU's memory was in use after them than before the first, by any process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM
from two_gpus import ON_GPU_1
from weight_sync import ENGINES

from drivetrain import InferenceEngine, create_engine
from drivetrain_weight_sync import WeightSync

RANKS: Final = 2
REPEATS: Final = 6


def sharded_model(folder: Path, device: torch.device) -> nn.Module:
    """Return a model at random whose layers are sharded one by one."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    torch.manual_seed(torch.distributed.get_rank())
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.to_local().normal_(std=0.02)
    return model


def full_gather_ms(model: nn.Module) -> float:
    taken = []
    for _ in range(REPEATS):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for tensor in model.state_dict().values():
            tensor.full_tensor()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken[1:])


def copy_ms(nbytes: int) -> float:
    """Return how long a copy from one GPU to the other takes."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(RANKS))
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(1)
        torch.cuda.synchronize(0)
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken[1:])


def engine_of(args: argparse.Namespace, folder: Path) -> InferenceEngine:
    if args.backend == "transformers":  # which loads weights, and makes none
        config = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        return create_engine("transformers", model=str(folder), dtype="bfloat16", device="cuda:1", isolation="process")
    fields = {"backend": args.backend, "model": str(folder), "dtype": "bfloat16", **ENGINES[args.backend]}
    if args.tensor_parallel:
        return create_engine({**fields, "tensor_parallel_size": RANKS})
    there = ON_GPU_1[args.backend]
    kwargs = fields["engine_kwargs"] | there.get("engine_kwargs", {})
    return create_engine({**fields, **there, "engine_kwargs": kwargs})


async def pushes(sync: WeightSync, number: int) -> dict[str, float]:
    first = await sync.push(version="first")
    results = [await sync.push(version=f"push-{index}") for index in range(number)]
    median = statistics.median
    return {
        "first push": 1e3 * first.total_seconds,
        "push": 1e3 * median(result.total_seconds for result in results),
        "  of that: gather, check and stage": 1e3 * median(r.total_seconds - r.update_seconds for r in results),
        "  of that: update": 1e3 * median(result.update_seconds for result in results),
    }


async def on_rank(args: argparse.Namespace, folder: Path, rank: int) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    engine = None
    if rank == 0:
        engine = engine_of(args, folder)
        await engine.start()
        print("the engine is up", file=sys.stderr, flush=True)
    torch.distributed.barrier()
    try:
        model = sharded_model(folder, device)
        figures = {"full gather": full_gather_ms(model)}
        state = model.state_dict()
        if rank == 0:
            figures["copy of a rank's shards"] = copy_ms(sum(t.to_local().nbytes for t in state.values()))
            torch.cuda.empty_cache()
        torch.distributed.barrier()
        name = "model.layers.1.mlp.down_proj.weight"
        expected = state[name].full_tensor()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
        strategy = args.strategy if engine is not None else "auto"
        async with WeightSync.connect(model, engine, strategy) as sync:
            figures |= await pushes(sync, args.pushes)
            in_use = free - torch.cuda.mem_get_info(device)[0]
        if engine is None:
            return {}
        read = await engine.get_weights_by_name(name)
        return {
            "device": f"{RANKS} x {torch.cuda.get_device_name(0)}",
            "backend": args.backend,
            "strategy": sync.strategy.value,
            "tensor_parallel_size": engine.config.tensor_parallel_size,
            "versions": engine.versions,
            "gb": sum(tensor.nbytes for tensor in state.values()) / 1e9,
            "in_use_gb": in_use / 1e9,
            "peak_gb": (torch.cuda.max_memory_allocated(device) - before) / 1e9,
            "tensor_equal": read.data == expected.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes(),
            "ms": figures,
        }
    finally:
        if engine is not None:
            await engine.teardown()


def main_of_rank(rank: int, port: int, args: argparse.Namespace, folder: Path) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        device_id=torch.device("cuda", rank),
    )
    document = asyncio.run(on_rank(args, folder, rank))
    torch.distributed.destroy_process_group()
    if rank == 0:
        figures = document["ms"]
        for name, milliseconds in figures.items():
            print(f"{name:40} {milliseconds:9.2f} ms  {milliseconds / figures['full gather']:6.2f} of a full gather")
        print(json.dumps({key: value for key, value in document.items() if key != "ms"}))
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=[*sorted(ENGINES), "transformers"])
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--tensor-parallel", action="store_true", help="an engine on both GPUs")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")  # the trainer is on it too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(main_of_rank, args=(port, args, model_folder(args.size)), nprocs=RANKS)


if __name__ == "__main__":
    main()
