"""How long a push of a LoRA adapter takes, by strategy, beside one plain copy of the same bytes in the same run.

    python benchmarks/lora_sync.py [BACKEND] [--layers 78] [--width 1024] [--rank 133] [--pushes 9] [--device cuda]
        [--strategies NAME ...] [--fields JSON] [--lock FILE] [--json]

The adapter changes the four matrices of each layer's attention, in bfloat16: 624 tensors of 170 MB unless told
otherwise. The engine serves in its host process and is idle. Strategies take turns, so that a busy machine slows all;
``--strategies`` leaves out others. Figures are medians over the pushes after the first; the first one, which also makes
the arena, is given by itself. With ``--device cuda`` the adapter is on the engine's GPU. ``--fields`` are more fields
of the engine's configuration. With ``--lock``, of the runs that share a machine only one measures at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from turns import turn

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import AdapterTensors, LoraSync, LoraSyncResult

if TYPE_CHECKING:
    from pathlib import Path

STRATEGIES = {
    "cpu": ("disk", "broadcast", "shared_memory"),
    "cuda": ("disk", "shared_memory", "cuda_ipc"),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Row:
    strategy: str
    first_ms: float
    total_ms: float
    stage_ms: float
    update_ms: float
    times_copy: float
    """Total time in plain copies of the same bytes."""
    times_folder: float
    """Total time against that of strategy ``disk``."""


def model_of(layers: int, width: int) -> Path:
    heads = width // 64
    return tiny_model(
        "qwen2",
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        dtype="bfloat16",
    )


def adapter_of(layers: int, width: int, rank: int, device: str) -> AdapterTensors:
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{part}.weight": torch.empty(
            (rank, width) if part == "A" else (width, rank), dtype=torch.bfloat16, device=device
        )
        for layer in range(layers)
        for target in TARGETS
        for part in "AB"
    }
    return AdapterTensors(
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}, tensors
    )


def change(adapter: AdapterTensors) -> None:
    for tensor in adapter.tensors.values():
        tensor.normal_(std=0.01)


def copied_seconds(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> float:
    wait_for_device()
    begun = time.perf_counter()
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)
    wait_for_device()
    return time.perf_counter() - begun


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


async def measure(arguments: argparse.Namespace) -> tuple[float, list[Row], int, int]:
    """Return seconds of a plain copy, a row by strategy, and the adapter's number of tensors and bytes."""
    model = model_of(arguments.layers, arguments.width)
    adapter = adapter_of(arguments.layers, arguments.width, arguments.rank, arguments.device)
    strategies: list[str] = arguments.strategies or list(STRATEGIES[arguments.device])
    sources = list(adapter.tensors.values())
    destinations = [torch.empty_like(tensor) for tensor in sources]
    results: dict[str, list[LoraSyncResult]] = {strategy: [] for strategy in strategies}
    copies: list[float] = []
    config: dict[str, Any] = {"enable_lora": True, "max_loras": len(strategies), "max_lora_rank": arguments.max_rank}
    if arguments.memory is not None:
        config["gpu_memory_utilization"] = arguments.memory
    config |= arguments.fields
    async with AsyncExitStack() as stack:
        engine = create_engine(arguments.backend, model=str(model), isolation="process", **config)
        await stack.enter_async_context(engine)
        stack.enter_context(turn(arguments.lock))
        syncs = {
            strategy: await stack.enter_async_context(LoraSync.connect(adapter, engine, strategy, strategy))
            for strategy in strategies
        }
        for index in range(arguments.pushes + 1):
            for strategy, sync in syncs.items():
                change(adapter)
                wait_for_device()
                copies.append(copied_seconds(sources, destinations))
                results[strategy].append(await sync.push(version=f"{strategy}-{index}"))
    copy = statistics.median(copies[len(strategies) :])
    folder = median(results["disk"], "total_seconds") if "disk" in results else math.nan
    rows = [
        Row(
            strategy=strategy,
            first_ms=1e3 * of[0].total_seconds,
            total_ms=1e3 * median(of, "total_seconds"),
            stage_ms=1e3 * median(of, "stage_seconds"),
            update_ms=1e3 * median(of, "update_seconds"),
            times_copy=median(of, "total_seconds") / copy,
            times_folder=median(of, "total_seconds") / folder,
        )
        for strategy, of in results.items()
    ]
    return copy, rows, len(sources), sum(tensor.nbytes for tensor in sources)


def median(results: list[LoraSyncResult], field: str) -> float:
    return statistics.median(float(getattr(result, field)) for result in results[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("backend", nargs="?", default="transformers")
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=133)
    parser.add_argument("--max-rank", type=int, default=256)
    parser.add_argument("--memory", type=float, help="gpu_memory_utilization of the engine")
    parser.add_argument("--pushes", type=int, default=9)
    parser.add_argument("--device", choices=sorted(STRATEGIES), default="cpu")
    parser.add_argument("--strategies", nargs="+", metavar="NAME")
    parser.add_argument("--fields", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--lock", metavar="FILE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    copy, rows, count, nbytes = asyncio.run(measure(arguments))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    if arguments.json:
        print(json.dumps({"machine": machine, "copy_ms": 1e3 * copy, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    print(f"{arguments.backend}, {count} tensors, {nbytes / 1e6:.1f} MB, {machine}; a plain copy: {1e3 * copy:.1f} ms")
    print(f"{'strategy':14}{'first':>9}{'total':>9}{'stage':>9}{'update':>9}{'x copy':>9}{'x folder':>10}")
    for row in rows:
        print(
            f"{row.strategy:14}{row.first_ms:9.1f}{row.total_ms:9.1f}{row.stage_ms:9.1f}{row.update_ms:9.1f}"
            f"{row.times_copy:9.1f}{row.times_folder:10.2f}"
        )


if __name__ == "__main__":
    main()
