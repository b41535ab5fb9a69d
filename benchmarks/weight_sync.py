"""How long a weight push takes, by strategy, beside one plain copy of the same bytes in the same run.

    python benchmarks/weight_sync.py [--layers N] [--width N] [--pushes N] [--threads N] [--json]

The engine is the transformers backend with random weights, idle. Figures are medians over the pushes after the first;
the first, which agrees on the plan and makes the arena, is given by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import WeightSync, WeightSyncResult, digests
from drivetrain_weight_sync.finite import non_finite

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = [
    ("inline", "in_process"),
    ("inline", "shared_memory"),
    ("inline", "disk"),
    ("process", "shared_memory"),
    ("process", "disk"),
]


@dataclass(frozen=True)
class Row:
    isolation: str
    strategy: str
    first_ms: float
    total_ms: float
    check_ms: float
    stage_ms: float
    update_ms: float
    gb_per_second: float
    times_copy: float
    """Total time in plain copies of the same bytes."""
    update_times_copy: float
    """The engine's part, during which it may be paused, in plain copies."""


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def copy_all(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def row(isolation: str, strategy: str, results: list[WeightSyncResult], copy_seconds: float) -> Row:
    def median(field: str) -> float:
        return statistics.median(float(getattr(result, field)) for result in results[1:])

    total, update = median("total_seconds"), median("update_seconds")
    return Row(
        isolation=isolation,
        strategy=strategy,
        first_ms=1e3 * results[0].total_seconds,
        total_ms=1e3 * total,
        check_ms=1e3 * median("check_seconds"),
        stage_ms=1e3 * median("stage_seconds"),
        update_ms=1e3 * update,
        gb_per_second=results[0].nbytes / total / 1e9,
        times_copy=total / copy_seconds,
        update_times_copy=update / copy_seconds,
    )


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    path = tiny_model(
        "qwen2",
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        dtype="bfloat16",
    )
    rows: list[Row] = []
    limits: dict[str, object] = {}
    tensors: dict[str, torch.Tensor] = {}
    for isolation, strategy in CASES:
        async with create_engine("transformers", model=str(path), isolation=isolation) as engine:
            manifest = await engine.weight_manifest()
            if not tensors:
                tensors = {
                    spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in manifest.tensors
                }
            async with WeightSync.connect(tensors, engine, strategy) as sync:
                results = [await sync.push(version=f"v{i}") for i in range(arguments.pushes + 1)]
        sources = list(tensors.values())
        destinations = [torch.zeros_like(tensor) for tensor in sources]
        copy_seconds = median_seconds(lambda: copy_all(sources, destinations), arguments.pushes)  # noqa: B023
        rows.append(row(isolation, strategy, results, copy_seconds))
        nbytes = sum(tensor.nbytes for tensor in sources)
        limits = {
            "copy_ms": 1e3 * copy_seconds,
            "copy_gb_per_second": nbytes / copy_seconds / 1e9,
            "digest_gb_per_second": nbytes / median_seconds(lambda: digests(tensors), arguments.pushes) / 1e9,  # noqa: B023
            "finite_gb_per_second": nbytes / median_seconds(lambda: non_finite(tensors), arguments.pushes) / 1e9,  # noqa: B023
        }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gigabytes": sum(tensor.nbytes for tensor in tensors.values()) / 1e9,
        "tensors": len(tensors),
        "pushes": arguments.pushes,
        "limits": limits,
        "rows": [asdict(r) for r in rows],
    }


def show(found: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows, limits = found["rows"], found["limits"]
    assert isinstance(rows, list)
    assert isinstance(limits, dict)
    console = Console()
    size = f"{found['gigabytes']:.3f} GB in {found['tensors']} tensors"
    console.print(f"{found['machine']}, {found['threads']} torch threads: {size}")
    console.print(", ".join(f"{name} {value:.2f}" for name, value in limits.items()))
    headings = ["engine", "strategy", "first", "total", "check", "stage", "update", "GB/s", "total", "update"]
    units = ["", "", "ms", "ms", "ms", "ms", "ms", "", "x copy", "x copy"]
    table = Table(*(f"{heading}\n{unit}" for heading, unit in zip(headings, units, strict=True)), padding=(0, 0))
    for entry in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else value for value in entry.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a weight push takes, beside one plain copy of its bytes.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
