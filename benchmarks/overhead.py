"""Measure the overhead of ``InferenceEngine`` over the bare scheduler loop, on the same work, in one run.

    python benchmarks/overhead.py [--isolation inline process] [--sizes 1 4 16 64 256 1024] [--rounds 5]
        [--device cpu] [--json]

The bare loop is the transformers backend's scheduler in one thread: the same model, requests, sampling and batch,
with no engine page, no event loop and no socket, and without decoding the ids to text. A round times each side once
in turn, and which goes first alternates. Reported are, of bare time ÷ engine time (1.00 would be free), the median over
rounds with its range, and the ratio of the best times, which other work on the machine disturbs least; from the best
times come also the µs that the engine adds per request and per token.

On a machine that does other work, wall times differ by more from round to round than the engine costs. So the CPU
time of the engine's own threads is counted too: this event loop's and, for a hosted engine, the host's event loop's.
Were none of it hidden behind the model's work, the ratio would be ``bare / (bare + own CPU)``: ``from CPU``.

Threads are limited to one per side, so that the engine's own work is not hidden by idle cores more than in a
trainer. The inline engine shares this process; the hosted one loads the model again in its host process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from drivetrain import EngineConfig, InferenceEngine, SamplingParams, create_engine
from drivetrain.backend.base import GenerateRequest
from drivetrain.testing import tiny_model
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.sampling import LogprobsMode
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.scheduler import Scheduler
from drivetrain_transformers.translate import PREFIX_CACHE_BYTES

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Row:
    """One comparison."""

    isolation: str
    batch: int
    new_tokens: int
    bare_s: float
    engine_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    best_ratio: float
    own_cpu_us_per_request: float
    ratio_from_cpu: float
    us_per_request: float
    us_per_token: float
    tokens_per_s: float


def config(model: Path, isolation: str, rows: int, device: str) -> EngineConfig:
    return EngineConfig(
        backend="transformers", model=str(model), device=device, isolation=isolation, max_num_seqs=rows  # type: ignore[arg-type]
    )  # fmt: skip


def prompts(count: int, salt: int) -> list[list[int]]:
    """Prompts that share no prefix with each other or with another round's."""
    draw = torch.Generator().manual_seed(salt)
    return torch.randint(0, 256, (count, PROMPT_TOKENS), generator=draw).tolist()  # type: ignore[no-any-return]


class BareLoop:
    """The scheduler, driven to the end in this thread."""

    def __init__(self, settings: EngineConfig) -> None:
        self.model = LoadedModel.load(settings, lambda stage: None)
        self.scheduler = Scheduler(
            self.model,
            Tokenizer.load(settings),
            version="initial",
            max_rows=settings.max_num_seqs or 1,
            max_prefill_tokens=8192,
            prefix_cache_bytes=PREFIX_CACHE_BYTES,
        )

    def run(self, batch: Sequence[list[int]], params: SamplingParams) -> list[object]:
        results: list[object] = []
        assert params.max_new_tokens is not None
        for index, prompt in enumerate(batch):
            request = GenerateRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=params,
                max_new_tokens=params.max_new_tokens,
                stop_token_ids=(),
                logprobs_mode=LogprobsMode.TEMPERATURE,
                seed=params.seed,
            )
            self.scheduler.submit(request, results.append)
        while not self.scheduler.idle:
            self.scheduler.step()
        assert len(results) == len(batch)
        return results


def own_cpu_seconds(engine: InferenceEngine) -> float:
    """CPU time so far of this thread, where the event loop runs, and of a host's main thread, where its loop runs."""
    own = time.thread_time()
    if engine.host_pid is not None:
        # First field: nanoseconds on a CPU.
        own += int(Path(f"/proc/{engine.host_pid}/task/{engine.host_pid}/schedstat").read_text().split()[0]) * 1e-9
    return own


async def compare(engine: InferenceEngine, bare: BareLoop, batch: int, new_tokens: int, rounds: int) -> Row:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=0, seed=1)
    bare_times: list[float] = []
    engine_times: list[float] = []
    own_cpu: list[float] = []
    for number in range(rounds + 1):
        work = prompts(batch, number)
        for side in ("bare", "engine") if number % 2 else ("engine", "bare"):
            gc.collect()
            began, cpu = time.perf_counter(), own_cpu_seconds(engine)
            if side == "bare":
                bare.run(work, params)
            else:
                output = await engine.generate(work, params)
                assert all(len(completion.token_ids) == new_tokens for completion in output.completions)
            elapsed = time.perf_counter() - began
            if number and side == "engine":
                own_cpu.append(own_cpu_seconds(engine) - cpu)
            if number:  # The first round warms both sides up.
                (bare_times if side == "bare" else engine_times).append(elapsed)
    ratios = sorted(b / e for b, e in zip(bare_times, engine_times, strict=True))
    bare_s, engine_s = statistics.median(bare_times), statistics.median(engine_times)
    added = min(engine_times) - min(bare_times)
    return Row(
        isolation=engine.isolation.value,
        batch=batch,
        new_tokens=new_tokens,
        bare_s=bare_s,
        engine_s=engine_s,
        ratio=statistics.median(ratios),
        ratio_low=ratios[0],
        ratio_high=ratios[-1],
        best_ratio=min(bare_times) / min(engine_times),
        own_cpu_us_per_request=statistics.median(own_cpu) / batch * 1e6,
        ratio_from_cpu=bare_s / (bare_s + statistics.median(own_cpu)),
        us_per_request=added / batch * 1e6,
        us_per_token=added / batch / new_tokens * 1e6,
        tokens_per_s=batch * new_tokens / engine_s,
    )


async def measure(arguments: argparse.Namespace) -> list[Row]:
    model = tiny_model(
        "qwen2",
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
    )
    rows: list[Row] = []
    for isolation in arguments.isolation:
        bare = BareLoop(config(model, "inline", max(arguments.sizes), arguments.device))
        async with create_engine(config(model, isolation, max(arguments.sizes), arguments.device)) as engine:
            for batch in arguments.sizes:
                row = await compare(engine, bare, batch, arguments.new_tokens, arguments.rounds)
                rows.append(row)
                print(
                    f"{row.isolation:8} batch {row.batch:5}  bare {row.bare_s * 1e3:9.1f} ms  engine "
                    f"{row.engine_s * 1e3:9.1f} ms  ratio {row.ratio:.3f} "
                    f"({row.ratio_low:.3f} to {row.ratio_high:.3f}, "
                    f"best {row.best_ratio:.3f}, from CPU {row.ratio_from_cpu:.4f})  "
                    f"{row.us_per_request:+8.1f} µs/request  {row.us_per_token:+7.2f} µs/token  "
                    f"{row.tokens_per_s:9.0f} tok/s",
                    file=sys.stderr,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolation", nargs="+", default=["inline", "process"], choices=["inline", "process"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rows = asyncio.run(measure(arguments))
    if arguments.json:
        machine = {
            "device": arguments.device,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
