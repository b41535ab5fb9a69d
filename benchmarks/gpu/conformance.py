"""Run the conformance suite on a GPU, in shards beside each other.

    python benchmarks/gpu/conformance.py sglang FOLDER      # whole.json, and a report and a log of each shard
    python benchmarks/gpu/conformance.py vllm FOLDER --remote --fork --seconds 500

Most of the time goes into starting engines. Cases that share an engine are in one shard, and the shards take about as
long as each other, estimated from the kept reports. ``--list`` shows them. ``--at-once`` says how many run beside each
other; each takes about 4 GB of memory and 3 GB of the GPU. Cases that need two GPUs wait for the others. So do cases
that measure memory, one shard after another, if the driver does not say how much each process holds.

``--fork`` imports the engine once for each shard and forks its processes, if the imports leave CUDA alone. After
``--seconds``, running shards are killed; their reports hold the cases that had ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from drivetrain.errors import EngineStartError
from drivetrain_conformance.assertions.memory_use import tells_processes_apart
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.case import Case
from drivetrain_conformance.harness.fork_server import ForkServer

Cost = Callable[[Sequence[Case]], float]
KEPT = Path(__file__).parents[2] / "conformance_tests/results"


@dataclass(frozen=True)
class Kind:
    """Cases whose engines get the same settings."""

    name: str
    pattern: str
    gpus: int = 1
    alone: bool = False
    settings: str = "usual"


MEMORY = Kind(
    "memory",
    r"^sleep/(the_memory|memory_is|kept_weights_give|cycles|many_cycles)|/many_pushes|^growth/requests_leave"
    r"|^lifecycle/two_in_a_row",
    alone=True,
    settings="large",
)
KINDS = [
    Kind("pairs", r"^parallel/|between_gpus", gpus=2),
    Kind("storage", r"storage_tier", settings="storage"),
    Kind("experts", r"^hidden_states/.*expert", settings="experts"),
    # closing_never_hangs starts engines of each task.
    Kind("pooling", r"^(embeddings|score)/(?!a_generating_engine)|/closing_never_hangs$", settings="pooling"),
    Kind("usual", r""),
]
"""A case is of the first kind whose pattern it matches."""


@dataclass(frozen=True)
class Shard:
    """Cases that run one after another, and the seconds that they are expected to take."""

    kind: Kind
    cases: list[str]
    cost: float


START = {"sglang": 45.0, "transformers": 3.0, "vllm": 45.0}
"""Seconds in which an engine starts beside others."""
LEAST = 25.0
"""Seconds that a shard should take at least, some ten of which are imports of its own."""
LONGEST_SHARED = 15.0
"""Most seconds assumed of a case that shares its engine; a longer one in a report started that engine."""

_SGLANG = {
    "sampling_backend": "pytorch",
    "mm_attention_backend": "triton_attn",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16],
}
_SMALL_POOL = {"max_total_tokens": 60000}
_NO_COMPILER = {"enforce_disable_flashinfer_allreduce_fusion": True}
"""Or two ranks compile a kernel with nvcc first, for minutes."""
_VLLM = {
    "optimization_level": 0,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
    "kernel_config": {"enable_flashinfer_autotune": False},
}
_SMALL_CACHE = {"kv_cache_memory_bytes": 2_000_000_000}
_STORAGE = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}

ENGINE_KWARGS: dict[str, dict[str, dict[str, object]]] = {
    "sglang": {
        "usual": {**_SGLANG, **_SMALL_POOL, **_NO_COMPILER, "enable_return_hidden_states": True},
        "experts": {**_SGLANG, **_SMALL_POOL, "enable_return_routed_experts": True},
        "storage": {**_SGLANG, **_SMALL_POOL, **_STORAGE},
        "pooling": {**_SGLANG, **_SMALL_POOL},
        "large": _SGLANG,
    },
    "transformers": {},
    "vllm": {
        "usual": {**_VLLM, **_SMALL_CACHE},
        "experts": {**_VLLM, **_SMALL_CACHE, "enable_return_routed_experts": True},
        "pooling": {"enforce_eager": True, **_SMALL_CACHE},
        "storage": {**_VLLM, **_SMALL_CACHE},
        "large": _VLLM,
    },
}
FIELDS: dict[str, dict[str, dict[str, object]]] = {
    "sglang": {
        # The pool is small, but the share must also cover memory that other processes take while SGLang starts.
        "usual": {"attention_backend": "triton", "gpu_memory_utilization": 0.85},
        "large": {"attention_backend": "triton", "gpu_memory_utilization": 0.3},
    },
    "transformers": {"usual": {}},
    "vllm": {"usual": {"gpu_memory_utilization": 0.05}, "large": {"gpu_memory_utilization": 0.3}},
}
DTYPES = {"sglang": "bfloat16", "transformers": "float32", "vllm": "bfloat16"}
ENVIRONMENT = {
    # SGLang takes what others hold of a GPU for its own, and for an imbalance between two.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")}
"""A forked host has imported vLLM; its engine core would otherwise import vLLM again."""

# Shards --------------------------------------------------------------------------------------------------------------


def seconds_of(backend: str) -> dict[str, float]:
    """Return the seconds that each case took, in the newest report that has it; of a GPU's if there is one."""
    found: dict[str, float] = {}
    for name in (backend, f"{backend}-h200"):
        report = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
        found |= {entry["case"]: entry["seconds"] for entry in report["cases"]}
    return found


def key_of(case: Case) -> str:
    """Return a key that is equal for cases that can run on one engine."""
    return f"{case.model.name} {json.dumps(dict(case.config), sort_keys=True, default=str)}"


def cost_of(cases: Iterable[Case], seconds: dict[str, float], start: float) -> float:
    """Return the seconds that cases take one after another, with the engines that are started for them."""
    cost, key = 0.0, ""
    for case in cases:
        if case.own_engine:
            cost, key = cost + seconds.get(case.id, start), ""
            continue
        if key_of(case) != key:
            cost, key = cost + start, key_of(case)
        cost += min(seconds.get(case.id, 1.0), LONGEST_SHARED)
    return cost


def shards_of(cases: Sequence[Case], backend: str, kinds: Sequence[Kind], at_once: int) -> dict[str, Shard]:
    """Return the shards by name, the longest first; each case is in exactly one."""
    seconds, start = seconds_of(backend), START[backend]
    place = {case.id: index for index, case in enumerate(cases)}
    of_kind: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        of_kind[next(kind.name for kind in kinds if re.search(kind.pattern, case.id))].append(case)

    def cost(some: Sequence[Case]) -> float:
        return cost_of(sorted(some, key=lambda case: place[case.id]), seconds, start)

    # More shards than run at once, so that the last one is not alone for long; but none that mostly imports.
    longest = max(3 * start, LEAST, sum(map(cost, of_kind.values())) / (1.3 * at_once))
    shards: dict[str, Shard] = {}
    for kind in kinds:
        bins: list[list[Case]] = []
        for unit in sorted(_units(of_kind[kind.name], cost, longest), key=cost, reverse=True):
            _add(unit, bins, cost, longest)
        for number, one in enumerate(bins, start=1):
            name = f"{kind.name}-{number}" if len(bins) > 1 else kind.name
            shards[name] = Shard(kind, [case.id for case in one], cost(one))
    return dict(sorted(shards.items(), key=lambda item: item[1].cost, reverse=True))


def _units(cases: Sequence[Case], cost: Cost, longest: float) -> list[list[Case]]:
    """Divide cases into those that share an engine, as long as they take no longer than a shard."""
    units = [[case] for case in cases if case.own_engine]
    shared: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.own_engine:
            continue
        part = shared[key_of(case)]
        if part and cost([*part, case]) > longest:
            units.append(part)
            part = shared[key_of(case)] = []
        part.append(case)
    return units + list(shared.values())


def _add(unit: list[Case], bins: list[list[Case]], cost: Cost, longest: float) -> None:
    """Add cases to the shard that then takes the least, or to a new one."""
    with_it = [one for one in bins if cost([*one, *unit]) <= longest]
    if with_it:
        min(with_it, key=lambda one: cost([*one, *unit])).extend(unit)
    else:
        bins.append(list(unit))


# Running -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Settings that all shards share."""

    backend: str
    folder: Path
    options: list[str]
    environment: dict[str, str]
    end: float
    """Value of ``time.monotonic`` at which running shards are killed."""

    def shard(self, name: str, shard: Shard, devices: str) -> None:
        """Run one shard, and print its last line."""
        left = self.end - time.monotonic()
        if left <= 0:
            print(f"{name}: no time left", flush=True)
            return
        begun, log = time.monotonic(), self.folder / f"{name}.log"
        with log.open("w") as output:
            environment = {**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": devices}
            command = self._command(shard, self.folder / f"{name}.json")
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                _kill_family(process)
        lines = log.read_text(errors="replace").splitlines()
        took = time.monotonic() - begun
        print(f"{name} on {devices}, {took:.0f} s: {lines[-1] if lines else 'nothing'}", flush=True)

    def _command(self, shard: Shard, report: Path) -> list[str]:
        fields, settings = FIELDS[self.backend], shard.kind.settings
        given = [f"{field}={value}" for field, value in fields.get(settings, fields["usual"]).items()]
        if kwargs := ENGINE_KWARGS[self.backend].get(settings):
            given.append(f"engine_kwargs={json.dumps(kwargs)}")
        command = [sys.executable, "-m", "drivetrain", "conformance", self.backend, "--dtype", DTYPES[self.backend]]
        command += [*self.options, "--report", str(report)]
        command += [word for one in given for word in ("--set", one)]
        return command + [word for case in shard.cases for word in ("--case", case)]

    def shards(self, some: dict[str, Shard], devices: Sequence[str], at_once: int) -> None:
        """Run shards beside each other, each on the next of the devices."""
        with ThreadPoolExecutor(max(1, at_once)) as pool:
            for index, (name, shard) in enumerate(some.items()):
                pool.submit(self.shard, name, shard, devices[index % len(devices)])


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a shard and its descendants: a ``drivetrain host`` would outlive it, and keep its memory of the GPU."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def forks(backend: str) -> bool:
    """Return whether processes can be forked from one that has imported the engine; if not, say why."""
    os.environ["OMP_NUM_THREADS"] = ENVIRONMENT["OMP_NUM_THREADS"]
    try:
        with ForkServer(backend):
            return True
    except EngineStartError as error:
        print(f"--fork: {error}", flush=True)
        return False


def combined(folder: Path, names: Iterable[str]) -> int:
    """Combine the reports of shards into one, print what it says, and return the exit code."""
    reports = [str(folder / f"{name}.json") for name in names if (folder / f"{name}.json").exists()]
    if not reports:
        print("no case was through", flush=True)
        return 1
    command = [sys.executable, "-m", "drivetrain", "combine", *reports, "--output", str(folder / "whole.json")]
    return subprocess.run(command, check=False).returncode


def main() -> None:
    """Run the shards that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINE_KWARGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="run cases whose id matches this pattern")
    parser.add_argument("--isolation", choices=("inline", "process"), help="default: the backend's")
    parser.add_argument("--remote", action="store_true", help="use each engine through create_engine('remote')")
    parser.add_argument("--fork", action="store_true", help="fork the engines' processes from one that imported them")
    parser.add_argument("--at-once", type=int, default=3 * (os.cpu_count() or 1) // 2, help="default: 3 for 2 cores")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end what still runs after this time")
    parser.add_argument("--list", action="store_true", help="list the shards and run nothing")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    apart = tells_processes_apart()
    print(f"memory is measured {'of each process' if apart else 'of the whole GPU, alone'}", flush=True)
    kinds = KINDS if apart else [MEMORY, *KINDS]
    cases = [case for case in all_cases() if re.search(args.only, case.id)]
    shards = shards_of(cases, args.backend, kinds, args.at_once)
    if args.list:
        for name, shard in shards.items():
            print(f"{name}: {len(shard.cases)} cases, {shard.cost:.0f} s")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    forked = args.fork and forks(args.backend)
    options = ["--isolation", args.isolation] if args.isolation else []
    options += [*["--remote"] * args.remote, *["--fork-hosts"] * forked]
    run = Run(args.backend, args.folder, options, ENVIRONMENT | (_FORKED if forked else {}), end)
    gpus = max(torch.cuda.device_count(), 1)
    alone = {name: shard for name, shard in shards.items() if shard.kind.alone}
    pairs = {name: shard for name, shard in shards.items() if shard.kind.gpus > 1}
    others = {name: shard for name, shard in shards.items() if name not in alone | pairs}
    run.shards(others, [str(gpu) for gpu in range(gpus)], args.at_once)
    run.shards(pairs, [",".join(map(str, range(gpus)))], args.at_once)
    run.shards(alone, ["0"], 1)
    sys.exit(combined(args.folder, shards))


if __name__ == "__main__":
    main()
