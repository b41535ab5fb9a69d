"""Decode steps of the transformers backend with CUDA graphs and without, side by side: logits and time.

    python benchmarks/gpu/decode_graphs.py [ARCHITECTURE …] [--dtype bfloat16] [--rows 64] [--steps 150] [--json FILE]

Each model decodes the same ids twice, on two caches of its own; rows leave and join meanwhile. Prints the largest
difference of the logits, as a share of their norm, and the median time of a step that was replayed and of a plain one.
Exits with 1 if a difference is more than rounding leaves, or if no graph was replayed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain_transformers.decode_graphs import DecodeGraphs
from drivetrain_transformers.kv_cache import RunningCache
from drivetrain_transformers.model import LoadedModel

SIZES: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32000}
TOLERATED = {"float32": 1e-3, "bfloat16": 0.3}
"""By dtype, as a share of the logits' norm. The two caches drift apart by rounding, which bfloat16 does a lot."""


def model_of(architecture: str, dtype: str) -> LoadedModel:
    sizes = {} if architecture in ("gpt2", "opt", "gpt_neox") else SIZES
    folder = tiny_model(architecture, dtype=dtype, **sizes)
    config = EngineConfig(
        backend="transformers", model=str(folder), device="cuda", dtype=dtype, isolation=Isolation.PROCESS
    )
    return LoadedModel.load(config, lambda stage: None)


class Run:
    def __init__(self, model: LoadedModel, graphs: DecodeGraphs, rows: int) -> None:
        self.model = model
        self.caches = [RunningCache(graphs), RunningCache()]
        self.ids: list[int] = []
        self.draw = torch.Generator().manual_seed(0)
        self.worst = 0.0
        self.seconds: list[list[float]] = [[], []]
        self.join(rows)

    def join(self, rows: int) -> None:
        lengths = torch.randint(4, 97, (rows,), generator=self.draw).tolist()
        prompts = [torch.randint(5, 250, (length,), generator=self.draw).tolist() for length in lengths]
        for cache in self.caches:
            past = self.model.empty_cache()
            self.model.prefill(prompts, [None] * rows, past, 0, all_positions=False)
            cache.admit(past, list(range(rows)), lengths)
        self.ids += [prompt[0] for prompt in prompts]

    def leave(self, row: int) -> None:
        for cache in self.caches:
            cache.release(row)
        self.ids[row] = self.ids[-1]
        self.ids.pop()

    def step(self) -> None:
        found = []
        for cache, seconds in zip(self.caches, self.seconds, strict=True):
            cache.open_column()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            logits = self.model.decode(self.ids, [None] * len(self.ids), cache).logits.clone()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
            cache.close_column()
            found.append(logits.float())
        self.worst = max(self.worst, float((found[0] - found[1]).norm() / found[1].norm()))
        self.ids = found[1].argmax(-1).tolist()


def measure(architecture: str, dtype: str, rows: int, steps: int) -> dict[str, object]:
    model = model_of(architecture, dtype)
    graphs = model.decode_graphs()
    if graphs is None:
        return {"architecture": architecture, "graphs": "left alone"}
    replays = 0
    capture = graphs.capture

    def counting(compute):  # type: ignore[no-untyped-def]
        replay = capture(compute)

        def counted() -> torch.Tensor:
            nonlocal replays
            replays += 1
            return replay()

        return counted

    graphs.capture = counting
    run = Run(model, graphs, rows)
    for step in range(steps):
        run.step()
        if step % 40 == 20:
            run.leave(1)
        if step % 40 == 30:
            run.join(1)
    with_graphs, plain = ([1000 * each for each in seconds] for seconds in run.seconds)
    return {
        "architecture": architecture,
        "replays": replays,
        "off": graphs.is_off,
        "worst": run.worst,
        "ms": statistics.median(with_graphs),
        "plain_ms": statistics.median(plain),
        "most_ms": max(with_graphs[5:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["qwen2", "qwen3", "llama", "phi3", "gpt2", "gpt_neox", "opt", "qwen3_moe", "mixtral", "mistral"]
    parser.add_argument("architectures", nargs="*", default=every)
    parser.add_argument("--dtype", choices=sorted(TOLERATED), default="bfloat16")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found, failed = [], False
    for architecture in given.architectures:
        one = measure(architecture, given.dtype, given.rows, given.steps)
        print(json.dumps(one), flush=True)
        failed |= "replays" in one and (not one["replays"] or one["worst"] > TOLERATED[given.dtype])  # type: ignore[operator]
        found.append(one)
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
