"""All that is measured of engines that quantise a bfloat16 policy, on one GPU, in at most eight minutes.

    python benchmarks/gpu/quantised.py OUT [--sglang PATH] [--vllm PATH] [--only NAME …] [--minutes 8] [--list]

First ``weight_sync.py`` runs with each engine, one of which measures at a time; then ``architectures.py`` runs with
each kind of quantisation, all beside each other: pushes through shared memory and CUDA IPC, the second and the fifth
push over a connection, and pushes after a sleep, compared with fresh loads. Each run's output is kept in OUT, and a
summary is printed: times, verdicts, and the layers that a kernel quantises in place as the engine reports them. Exits
with 1 if a run failed or a comparison is not equal.

``--sglang`` and ``--vllm`` are prepended to PYTHONPATH for that engine's runs. A run that is not over when the minutes
are is ended, and counts as failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_fields import ENVIRONMENT

HERE: Final = Path(__file__).parent
FIRST_SECONDS: Final = 200
"""After so many seconds the comparisons begin, even if the times are still being measured."""
LOGGING: Final = """
import logging, sys
for name, form in ("drivetrain_weight_sync", "weight sync: %(message)s"), ("drivetrain.host", "%(message)s"):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form))
    log = logging.getLogger(name)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
"""
"""Run by each process, so that engines say how layers are quantised, and their hosts' logs are passed on."""


@dataclass(frozen=True)
class Run:
    """A run of one script."""

    name: str
    engine: str
    script: str
    arguments: tuple[str, ...]

    @property
    def is_timed(self) -> bool:
        """True if it measures times, which others would change."""
        return self.script == "weight_sync.py"


def quantised(kind: str) -> tuple[str, str]:
    """Arguments for an engine that quantises."""
    return "--engine-kwargs", json.dumps({"quantization": kind})


def times(name: str, engine: str, kind: str) -> Run:
    """A run of a model of real size."""
    return Run(name, engine, "weight_sync.py", (engine, "--size", "7b", "--pushes", "8", *quantised(kind)))


def compares(name: str, engine: str, architectures: Sequence[str], *more: str) -> Run:
    """A comparison with fresh loads, one architecture after the other, as one trainer at a time waits for the GPU."""
    common = ("--only", *architectures, "--sleep", "--beside", "1", "--minutes", "5")
    return Run(name, engine, "architectures.py", (engine, *common, *more))


PLAN: Final = (
    Run("time-sglang-fp8", "sglang", "weight_sync.py", ("sglang", "--pushes", "8", *quantised("fp8"))),
    Run(
        "time-vllm-fp8_per_channel", "vllm", "weight_sync.py", ("vllm", "--pushes", "8", *quantised("fp8_per_channel"))
    ),
    compares("sglang-fp8", "sglang", ["llama", "qwen3_moe"], *quantised("fp8")),
    compares("sglang-w8a8_fp8", "sglang", ["llama"], *quantised("w8a8_fp8")),
    compares("sglang-blocks", "sglang", ["qwen3", "qwen3_moe"], "--blocks"),
    compares("vllm-fp8_per_channel", "vllm", ["llama", "qwen3_moe"], *quantised("fp8_per_channel")),
    compares("vllm-fp8", "vllm", ["llama"], *quantised("fp8")),
    compares("vllm-fp8_per_block", "vllm", ["llama", "qwen3_moe"], *quantised("fp8_per_block")),
    # Engines derive tensors of attention from projections that they quantise.
    compares("sglang-fp8-mla", "sglang", ["deepseek_v3"], *quantised("fp8")),
    compares("sglang-blocks-mla", "sglang", ["deepseek_v3"], "--blocks"),
    compares("vllm-fp8_per_channel-mla", "vllm", ["deepseek_v3"], *quantised("fp8_per_channel")),
    compares("vllm-fp8-mla", "vllm", ["deepseek_v3"], *quantised("fp8")),
)


def command(run: Run, out: Path) -> list[str]:
    """Return what is executed."""
    arguments = [sys.executable, str(HERE / run.script), *run.arguments, "--json", str(out / f"{run.name}.json")]
    return [*arguments, "--lock", str(out / "lock")] if run.is_timed else arguments


async def execute(run: Run, args: argparse.Namespace) -> None:
    """Run it, and end it with all its processes if it is cancelled."""
    paths = [str(args.out / "logging"), getattr(args, run.engine), os.environ.get("PYTHONPATH", "")]
    environment = ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    begun = time.monotonic()
    (args.out / f"{run.name}.json").unlink(missing_ok=True)  # of an earlier run
    with (args.out / f"{run.name}.txt").open("wb") as text, (args.out / f"{run.name}.err").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command(run, args.out), stdout=text, stderr=errors, env=environment, start_new_session=True
        )
        try:
            await process.wait()
        except asyncio.CancelledError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
    print(f"{run.name}: {process.returncode} after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


async def execute_all(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Run all: those that measure times first."""
    timed = [asyncio.create_task(execute(run, args)) for run in runs if run.is_timed]
    others: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(60 * args.minutes):
            if timed:
                await asyncio.wait(timed, timeout=FIRST_SECONDS)
            others = [asyncio.create_task(execute(run, args)) for run in runs if not run.is_timed]
            await asyncio.gather(*timed, *others)
    except TimeoutError:
        print(f"ended after {args.minutes:g} minutes", file=sys.stderr, flush=True)
    finally:
        for task in (*timed, *others):
            task.cancel()
        await asyncio.gather(*timed, *others, return_exceptions=True)


def read(run: Run, out: Path) -> Any:
    """Return what a run wrote as JSON; None if it wrote none."""
    file = out / f"{run.name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def steps(run: Run) -> list[tuple[str, str]]:
    """Return the architectures and steps that a comparison must report."""
    only = run.arguments.index("--only") + 1
    architectures = run.arguments[only : run.arguments.index("--sleep")]
    names = (
        "shared_memory",
        "cuda_ipc",
        "cuda_ipc, second push",
        "cuda_ipc, fifth push",
        "asleep, old connection",
        "asleep, new connection",
    )
    return [(architecture, step) for architecture in architectures for step in names]


def summary(run: Run, out: Path) -> tuple[list[str], bool]:
    """Return lines about a run, and whether it is as it should be."""
    found = read(run, out)
    errors = out / f"{run.name}.err"
    log = errors.read_text(errors="replace") if errors.exists() else ""
    kernels = Counter(re.findall(r"weight sync: (.*)", log))
    lines = [f"  {many} processes: {text}" for text, many in kernels.items()]
    if run.is_timed:
        if found is None:
            return [*lines, "  no times: see its .err"], False
        c = found["ms"]["C"]
        return [*lines, *(f"  {name:50} {ms:9.2f} ms {ms / c:6.2f} C" for name, ms in found["ms"].items())], True
    verdicts = {(line["architecture"], line["step"]): line for line in found or ()}
    for key, line in verdicts.items():
        lines.append(f"  {', '.join(key)}: {line['verdict']} {line.get('gap', '')} {line.get('reason', '')}".rstrip())
    missing = [key for key in steps(run) if key not in verdicts]
    lines += [f"  {', '.join(key)}: not reached" for key in missing]
    is_right = not missing and all(verdicts[key]["verdict"] == "equal" for key in steps(run))
    return lines, is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for all output")
    parser.add_argument("--sglang", default="", metavar="PATH", help="paths of SGLang's environment")
    parser.add_argument("--vllm", default="", metavar="PATH", help="paths of vLLM's environment")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in PLAN], help="these runs")
    parser.add_argument("--minutes", type=float, default=8, help="end after so long")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    args = parser.parse_args()
    args.out = args.out.absolute()
    runs = [run for run in PLAN if args.only is None or run.name in args.only]
    if args.list:
        for run in runs:
            print(shlex.join(command(run, args.out)))
        return
    (args.out / "logging").mkdir(parents=True, exist_ok=True)
    (args.out / "logging" / "sitecustomize.py").write_text(LOGGING)
    asyncio.run(execute_all(runs, args))
    verdicts = []
    for run in runs:
        lines, is_right = summary(run, args.out)
        verdicts.append(is_right)
        print("\n".join([f"{run.name}: {'right' if is_right else 'NOT RIGHT'}", *lines]), flush=True)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
