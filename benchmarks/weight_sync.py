"""How long a weight push takes, by strategy, beside one plain copy of the same bytes in the same run.

    python benchmarks/weight_sync.py [--layers N] [--width N] [--pushes N] [--threads N] [--json]
    python benchmarks/weight_sync.py --counts 300 3000 30000 [--megabytes N]
    python benchmarks/weight_sync.py --engines 1 2 4 [--layers N] [--width N] [--pushes N]

The engine is the transformers backend with random weights, idle. Figures are medians over the pushes after the first;
the first, which agrees on the plan and makes the arena, is given by itself. Before each later push by delta, one
element in a hundred changes. With --counts: what a push through shared memory to a host process costs against the
number of tensors, of about the same bytes in all: those of the experts of a mixture. With --engines: a push through
shared memory to a fleet of so many host processes, against the first number. Beside it stands the limit: as many bare
processes copy the same bytes from one shared block at the same time, or copy and digest them, and do nothing else. Each
host copies and verifies all bytes with one thread, so more engines than cores take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from drivetrain_fleet import InferenceEngineClient
from drivetrain_weight_sync import WeightSync, WeightSyncResult, digests
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.transports.shared_arena import Arena, MappedArena

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from drivetrain import InferenceEngine

CASES = [
    ("inline", "in_process"),
    ("inline", "shared_memory"),
    ("inline", "disk"),
    ("process", "shared_memory"),
    ("process", "broadcast"),
    ("process", "disk"),
    ("process", "delta"),
]
CHANGED = 0.01
"""Fraction of the elements that change before each delta push, except the first."""


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
    sent: float
    """Bytes that travelled, of those of all tensors."""
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
        sent=median("sent_nbytes") / results[0].nbytes,
        times_copy=total / copy_seconds,
        update_times_copy=update / copy_seconds,
    )


def change(tensors: dict[str, torch.Tensor], draw: torch.Generator) -> None:
    for tensor in tensors.values():
        count = max(1, round(CHANGED * tensor.numel()))
        places = torch.randint(tensor.numel(), (count,), generator=draw)
        tensor.view(-1)[places] = torch.randn(count, generator=draw).to(tensor.dtype)


async def push_all(
    engine: InferenceEngine, tensors: dict[str, torch.Tensor], strategy: str, pushes: int
) -> list[WeightSyncResult]:
    """One push to begin with, and so many more."""
    draw, results = torch.Generator().manual_seed(0), []
    async with WeightSync.connect(tensors, engine, strategy) as sync:
        for index in range(pushes + 1):
            if strategy == "delta" and index:
                change(tensors, draw)
            results.append(await sync.push(version=f"v{index}"))
    return results


async def random_tensors(engine: InferenceEngine) -> dict[str, torch.Tensor]:
    manifest = await engine.weight_manifest()
    return {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in manifest.tensors}


async def measure_counts(arguments: argparse.Namespace) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    hidden, layers = 64, 4
    for count in arguments.counts:
        path = tiny_model(
            "qwen3_moe",
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_experts=max(2, count // (3 * layers)),
            moe_intermediate_size=max(8, round(arguments.megabytes * 1e6 / (2 * hidden * count) / 8) * 8),
            dtype="bfloat16",
        )
        async with create_engine("transformers", model=str(path), isolation="process") as engine:
            tensors = await random_tensors(engine)
            results = await push_all(engine, tensors, "shared_memory", arguments.pushes)
        sources = list(tensors.values())
        destinations = [torch.zeros_like(tensor) for tensor in sources]
        whole = torch.zeros(sum(tensor.nbytes for tensor in sources), dtype=torch.uint8)
        other = torch.zeros_like(whole)
        found = row(
            "process",
            "shared_memory",
            results,
            median_seconds(lambda: copy_all(sources, destinations), arguments.pushes),  # noqa: B023
        )
        at_once = median_seconds(lambda: copy_all([whole], [other]), arguments.pushes)  # noqa: B023
        rows.append(
            {
                "tensors": len(tensors),
                "megabytes": len(whole) / 1e6,
                "one_copy_ms": 1e3 * at_once,
                "copies_ms": found.total_ms / found.times_copy,
                "first_ms": found.first_ms,
                "total_ms": found.total_ms,
                "check_ms": found.check_ms,
                "stage_ms": found.stage_ms,
                "update_ms": found.update_ms,
                "update_us_per_tensor": 1e3 * found.update_ms / len(tensors),
            }
        )
    return rows


class Copier:
    """A process that copies a block of shared memory when told to, and digests its copy if asked."""

    def __init__(self, arena: Arena) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=copy_when_told, args=(arena.path, arena.nbytes, other), daemon=True)
        self._process.start()

    def tell(self, digest: bool) -> None:
        self._pipe.send(digest)

    def wait(self) -> None:
        self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def copy_when_told(path: str, nbytes: int, pipe: Connection) -> None:
    os.setsid()  # as hosts do: the kernel shares cores between sessions
    torch.set_num_threads(1)
    arena = MappedArena(path, nbytes)
    own = torch.zeros_like(arena.memory)
    pipe.send(None)
    while True:
        digest = pipe.recv()
        own.copy_(arena.memory)
        if digest:
            digests({"": own})
        pipe.send(None)


def bare_ms(count: int, nbytes: int, repeats: int) -> tuple[float, float]:
    """Return the time in which so many processes copy that many bytes, and in which they copy and digest them."""
    arena = Arena(nbytes)
    arena.memory.fill_(1)
    copiers = [Copier(arena) for _ in range(count)]

    def together(digest: bool) -> None:
        for copier in copiers:
            copier.tell(digest)
        for copier in copiers:
            copier.wait()

    try:
        for copier in copiers:
            copier.wait()
        return tuple(1e3 * median_seconds(partial(together, digest), repeats) for digest in (False, True))  # type: ignore[return-value]  # two
    finally:
        for copier in copiers:
            copier.end()
        arena.close()


async def measure_engines(arguments: argparse.Namespace) -> list[dict[str, float]]:
    path = model_of(arguments)
    rows: list[dict[str, float]] = []
    tensors: dict[str, torch.Tensor] = {}
    for count in arguments.engines:
        engines = [create_engine("transformers", model=str(path), isolation="process") for _ in range(count)]
        async with InferenceEngineClient(engines) as fleet:
            tensors = tensors or await random_tensors(fleet)
            later = (await push_all(fleet, tensors, "shared_memory", arguments.pushes))[1:]

        def median_ms(seconds: Callable[[WeightSyncResult], float], of: list[WeightSyncResult] = later) -> float:
            return 1e3 * statistics.median(map(seconds, of))

        total = median_ms(lambda result: result.total_seconds)
        copied, verified = bare_ms(count, later[-1].nbytes, arguments.pushes)
        rows.append(
            {
                "engines": count,
                "cores": os.cpu_count() or 0,
                "megabytes": sum(tensor.nbytes for tensor in tensors.values()) / 1e6,
                "staged_megabytes": later[-1].nbytes / 1e6,
                "total_ms": total,
                "check_ms": median_ms(lambda result: result.check_seconds),
                "stage_ms": median_ms(lambda result: result.stage_seconds),
                "update_ms": median_ms(lambda result: result.update_seconds),
                "bare_copy_ms": copied,
                "bare_copy_and_digest_ms": verified,
            }
        )
        for name in ("total", "update", "bare_copy", "bare_copy_and_digest"):
            rows[-1][f"{name}_times_first"] = rows[-1][f"{name}_ms"] / rows[0][f"{name}_ms"]
    return rows


def model_of(arguments: argparse.Namespace) -> Path:
    return tiny_model(
        "qwen2",
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        dtype="bfloat16",
    )


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    path = model_of(arguments)
    rows: list[Row] = []
    limits: dict[str, object] = {}
    tensors: dict[str, torch.Tensor] = {}
    for isolation, strategy in CASES:
        async with create_engine("transformers", model=str(path), isolation=isolation) as engine:
            tensors = tensors or await random_tensors(engine)
            results = await push_all(engine, tensors, strategy, arguments.pushes)
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
    headings = ["engine", "strategy", "first", "total", "check", "stage", "update", "GB/s", "sent", "total", "update"]
    units = ["", "", "ms", "ms", "ms", "ms", "ms", "", "", "x copy", "x copy"]
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
    parser.add_argument("--counts", type=int, nargs="+", help="numbers of tensors")
    parser.add_argument("--engines", type=int, nargs="+", help="sizes of a fleet to push to")
    parser.add_argument("--megabytes", type=float, default=256, help="with --counts: of all tensors together")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.counts or arguments.engines:
        for entry in asyncio.run((measure_counts if arguments.counts else measure_engines)(arguments)):
            print(json.dumps({name: round(value, 3) for name, value in entry.items()}), flush=True)
        return
    found = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
