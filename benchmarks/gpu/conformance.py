"""The conformance suite on a GPU, in shards beside each other: most of the time of each is engines that start.

    python benchmarks/gpu/conformance.py sglang FOLDER      # whole.json, and a report and a log of each shard

Wants a core for each shard (``--list`` shows them) and 80 GB of GPU; a second GPU for what needs two. Shards that
measure memory have a GPU to themselves: the last of several, on which what needs two waits for them; an only one once
the others are through. Every case is in exactly one shard: the first whose pattern it matches.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Shard:
    """Cases that run one after another."""

    name: str
    pattern: str
    parts: int = 1
    """Into how many shards these cases are split."""
    gpus: int = 1
    alone: bool = False
    settings: str = "usual"


SHARDS = [
    Shard(
        "memory",
        r"^sleep/(the_memory|memory_is|kept_weights_give|cycles|many_cycles_of)|/many_pushes",
        alone=True,
        settings="large",
    ),
    Shard("between", r"between_gpus", gpus=2),
    Shard("parallel", r"^parallel/", parts=4, gpus=2),
    Shard("faults", r"^faults/", parts=3),
    Shard("lifecycle", r"^lifecycle/", parts=3),
    Shard("recurrent", r"^generate/.*_is_right_or_refused"),
    Shard("scoring", r"^scoring/"),
    Shard("lora", r"^lora/|^openai/lora", parts=3),
    Shard("storage", r"storage_tier", settings="storage"),
    Shard("experts", r"^hidden_states/.*expert", settings="experts"),
    Shard("deterministic", r"^sampling/deterministic_"),
    Shard("mixtures", r"expert|mixture"),
    Shard("images", r"^multimodal/|^openai/image", parts=2),
    Shard("pooling", r"^(embeddings|score)/", settings="pooling"),
    Shard("weights", r"^weight_sync/", parts=3),
    Shard("sleep", r"^sleep/", parts=2),
    Shard("answers", r"^(generate|stop|logprob|streaming|structured_output|errors)/", parts=2),
    Shard("pauses", r"^(abort|pause|histories)/", parts=2),
    Shard("rest", r"", parts=2),
]

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
    "vllm": {"usual": {"gpu_memory_utilization": 0.05}, "large": {"gpu_memory_utilization": 0.3}},
}
ENVIRONMENT = {
    # SGLang takes what others hold of a GPU for its own, and for an imbalance between two.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


def shards_of(cases: list[str]) -> dict[str, tuple[Shard, list[str]]]:
    """Each shard with its cases, by name."""
    found: dict[str, tuple[Shard, list[str]]] = {}
    left = list(cases)
    for shard in SHARDS:
        mine = [case for case in left if re.search(shard.pattern, case)]
        left = [case for case in left if case not in mine]
        for part in range(shard.parts):
            name = f"{shard.name}-{part + 1}" if shard.parts > 1 else shard.name
            if mine[part :: shard.parts]:
                found[name] = shard, mine[part :: shard.parts]
    return found


def run(backend: str, name: str, shard: Shard, cases: list[str], devices: str, folder: Path) -> None:
    """Run one shard, and print its last line."""
    fields = FIELDS[backend].get(shard.settings, FIELDS[backend]["usual"])
    settings = [f"{field}={value}" for field, value in fields.items()]
    settings.append(f"engine_kwargs={json.dumps(ENGINE_KWARGS[backend][shard.settings])}")
    command = ["drivetrain", "conformance", backend, "--dtype", "bfloat16", "--report", str(folder / f"{name}.json")]
    command += [word for setting in settings for word in ("--set", setting)]
    command += [word for case in cases for word in ("--case", case)]
    begun = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        environment = {**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": devices}
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    took = time.monotonic() - begun
    print(f"{name} on {devices}, {took:.0f} s: {lines[-1] if lines else 'nothing'}", flush=True)


def main() -> None:
    """Run the shards that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINE_KWARGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="run shards whose name matches this pattern")
    parser.add_argument("--at-once", type=int, help="shards beside each other; default: all")
    parser.add_argument("--list", action="store_true", help="list the shards and run nothing")
    args = parser.parse_args()
    listed = subprocess.run(
        ["drivetrain", "conformance", "--list", "--json"], capture_output=True, text=True, check=True
    )
    shards = shards_of([item["case"] for item in json.loads(listed.stdout)["cases"]])
    chosen = {name: value for name, value in shards.items() if re.search(args.only, name)}
    if args.list:
        for name, (_, cases) in chosen.items():
            print(f"{len(cases):4}  {name}")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    gpus = max(torch.cuda.device_count(), 1)
    every = ",".join(map(str, range(gpus)))
    last = str(gpus - 1)

    def run_all(devices: list[str], some: list[str], at_once: int | None = None) -> None:
        with ThreadPoolExecutor(at_once or args.at_once or max(len(some), 1)) as pool:
            for index, name in enumerate(some):
                pool.submit(run, args.backend, name, *chosen[name], devices[index % len(devices)], args.folder)

    alone = [name for name, (shard, _) in chosen.items() if shard.alone]
    pairs = [name for name, (shard, _) in chosen.items() if shard.gpus > 1]
    others = [name for name in chosen if name not in alone and name not in pairs]
    if gpus == 1:
        run_all([last], others + pairs)
        run_all([last], alone, 1)
    else:
        with ThreadPoolExecutor(1) as beside:
            beside.submit(run_all, [last], alone, 1)
            beside.submit(run_all, [every], pairs)
            run_all([str(gpu) for gpu in range(gpus - 1)], others)
    reports = [str(args.folder / f"{name}.json") for name in chosen if (args.folder / f"{name}.json").exists()]
    whole = args.folder / "whole.json"
    sys.exit(subprocess.run(["drivetrain", "combine", *reports, "--output", str(whole)], check=False).returncode)


if __name__ == "__main__":
    main()
