"""Throughput of drivetrain's engine against the engine itself, ``sglang.Engine`` or vLLM's ``AsyncLLM``, in one run.

    python benchmarks/gpu/engine_overhead.py sglang [--size 1.8b|7b] [--work 1x512 64x1024 512x512 2048x256]
        [--rounds 3] [--minutes 9] [--json FILE]

Both engines are started with the same arguments and share the GPU; a round times each once on the same requests, in
turn, and which goes first alternates. Each round takes all batches before the next one begins, so that what disturbs
the machine for a while disturbs all of them. The engine itself runs in this process (with what processes it starts),
drivetrain's in its host process: what is compared is what a trainer has of either. Every request asks for the logprobs
of its tokens. Ratio is drivetrain's throughput ÷ the engine's own, the median over rounds with the middle half of them.
Beside it stands what the machine itself allows to be told: the engine's own rounds, each ÷ the one before it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from models import SIZES, model_folder

from drivetrain import InferenceEngine, SamplingParams, create_engine

PROMPT_TOKENS = 128


def prompts(count: int, vocabulary: int, salt: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(salt)
    return torch.randint(0, vocabulary, (count, PROMPT_TOKENS), generator=draw).tolist()  # type: ignore[no-any-return]


class SGLang:
    """``sglang.Engine``."""

    fields: ClassVar[dict[str, Any]] = {"attention_backend": "triton"}

    def __init__(self, share: float, most: int, cache_tokens: int) -> None:
        sizes = [1, 8, 64, 128, 256, 512, *range(768, most + 1, 256)]
        self.engine_kwargs: dict[str, Any] = {
            "load_format": "dummy",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": [size for size in sizes if size <= max(most, 8)],
            # Or that of the second to start has another size, and is full in another round.
            "max_total_tokens": cache_tokens,
        }
        self._most = most
        self._share = share

    async def start(self, model: str) -> None:
        from sglang import Engine

        self._engine = Engine(
            model_path=model,
            skip_tokenizer_init=True,
            log_level="error",
            mem_fraction_static=2 * self._share,  # it counts what others hold of the GPU as its own
            max_running_requests=self._most,
            sleep_on_idle=True,  # as drivetrain sets it, or the idle one of the two would keep a core busy
            **self.fields,
            **self.engine_kwargs,
        )

    async def time(self, work: list[list[int]], new_tokens: int) -> float:
        began = time.perf_counter()
        params = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        results = await self._engine.async_generate(input_ids=work, sampling_params=params, return_logprob=True)
        elapsed = time.perf_counter() - began
        assert all(len(result["output_ids"]) == new_tokens for result in results)
        assert all(len(result["meta_info"]["output_token_logprobs"]) == new_tokens for result in results)
        return elapsed

    def shutdown(self) -> None:
        self._engine.shutdown()


_BLOCK_TOKENS = 16
"""Tokens in one block of vLLM's KV cache."""


class VLLM:
    """vLLM's ``AsyncLLM``."""

    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, share: float, most: int, cache_tokens: int) -> None:
        sizes = [1, 8, 64, 128, 256, 512, *range(768, most + 1, 256)]
        self.engine_kwargs: dict[str, Any] = {
            "load_format": "dummy",
            "num_gpu_blocks_override": math.ceil(cache_tokens / _BLOCK_TOKENS),
            "optimization_level": 0,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [size for size in sizes if size <= max(most, 8)],
            },
            "kernel_config": {"enable_flashinfer_autotune": False},
        }
        self._most = most
        self._share = share
        self._numbers = itertools.count()

    async def start(self, model: str) -> None:
        # This process may have CUDA initialised, which its forks could not use.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=model,
            gpu_memory_utilization=self._share,
            max_num_seqs=self._most,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **self.engine_kwargs,
        )
        self._engine = AsyncLLM.from_engine_args(arguments)

    async def time(self, work: list[list[int]], new_tokens: int) -> float:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(prompt: list[int]) -> Any:
            name = str(next(self._numbers))
            async for output in self._engine.generate({"prompt_token_ids": prompt}, params, name):
                last = output
            return last.outputs[0]

        began = time.perf_counter()
        results = await asyncio.gather(*map(one, work))
        elapsed = time.perf_counter() - began
        assert all(len(result.token_ids) == len(result.logprobs) == new_tokens for result in results)
        return elapsed

    def shutdown(self) -> None:
        self._engine.shutdown()


BARE: dict[str, type[SGLang | VLLM]] = {"sglang": SGLang, "vllm": VLLM}


async def time_drivetrain(engine: InferenceEngine, work: list[list[int]], new_tokens: int) -> float:
    began = time.perf_counter()
    output = await engine.generate(work, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=0))
    elapsed = time.perf_counter() - began
    assert all(len(completion.token_ids) == new_tokens for completion in output.completions)
    assert all(len(completion.logprobs or ()) == new_tokens for completion in output.completions)
    return elapsed


@dataclass
class Row:
    """Seconds that a batch took, in each round."""

    batch: int
    new_tokens: int
    bare: list[float] = field(default_factory=list)
    drivetrain: list[float] = field(default_factory=list)

    async def take_a_round(self, own: SGLang | VLLM, engine: InferenceEngine, number: int) -> None:
        """Time both; the round of number 0 warms them up and does not count."""
        for side in ("bare", "drivetrain") if number % 2 else ("drivetrain", "bare"):
            work = prompts(self.batch, engine.model_info.vocab_size, 2 * number + (side == "bare"))
            gc.collect()
            if side == "bare":
                elapsed = await own.time(work, self.new_tokens)
            else:
                elapsed = await time_drivetrain(engine, work, self.new_tokens)
            if number:
                getattr(self, side).append(elapsed)

    def figures(self) -> dict[str, object]:
        """Return the medians and quartiles of the rounds so far."""
        ratios = [own / other for own, other in zip(self.bare, self.drivetrain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else 3 * ratios
        tokens = self.batch * self.new_tokens
        itself = [later / earlier for earlier, later in itertools.pairwise(self.bare)]
        itself_low, _, itself_high = statistics.quantiles(itself, n=4, method="inclusive") if itself[1:] else [None] * 3
        return {
            "batch": self.batch,
            "new_tokens": self.new_tokens,
            "bare_s": self.bare,
            "drivetrain_s": self.drivetrain,
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
            "itself_low": itself_low,
            "itself_high": itself_high,
            "tokens_per_s": tokens / statistics.median(self.drivetrain),
            "bare_tokens_per_s": tokens / statistics.median(self.bare),
        }

    def __str__(self) -> str:
        found = self.figures()
        itself = (
            "" if found["itself_low"] is None else f"; itself {found['itself_low']:.3f} to {found['itself_high']:.3f}"
        )
        return (
            f"batch {self.batch:5} x {self.new_tokens:5}  bare {found['bare_tokens_per_s']:9.0f} tok/s  "
            f"drivetrain {found['tokens_per_s']:9.0f} tok/s  ratio {found['ratio']:.3f} "
            f"({found['ratio_low']:.3f} to {found['ratio_high']:.3f}, {len(self.bare)} rounds{itself})"
        )


async def measure(arguments: argparse.Namespace) -> None:
    model = model_folder(arguments.size)
    work = [tuple(map(int, item.split("x"))) for item in arguments.work]
    most = max(batch for batch, _ in work)
    needed = max(batch * (PROMPT_TOKENS + new_tokens + _BLOCK_TOKENS) for batch, new_tokens in work)
    own = BARE[arguments.backend](arguments.memory_share, most, math.ceil(1.05 * needed))
    fields = {
        "backend": arguments.backend,
        "model": str(model),
        "enable_sleep": False,
        "gpu_memory_utilization": arguments.memory_share,
        "max_num_seqs": most,
        "engine_kwargs": own.engine_kwargs,
        **own.fields,
    }
    async with create_engine(fields) as engine:
        print("drivetrain's engine is up", file=sys.stderr, flush=True)
        await own.start(str(model))
        print("the engine itself is up", file=sys.stderr, flush=True)
        rows = [Row(batch, new_tokens) for batch, new_tokens in work]
        began = time.monotonic()
        for number in range(arguments.rounds + 1):
            for row in rows:
                await row.take_a_round(own, engine, number)
                if number:
                    print(row, file=sys.stderr, flush=True)
            if number and arguments.json:
                write(arguments, engine, rows)
            if number and time.monotonic() - began > 60 * arguments.minutes:
                break
    own.shutdown()


def write(arguments: argparse.Namespace, engine: InferenceEngine, rows: list[Row]) -> None:
    document = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "size": arguments.size,
        "versions": engine.versions,
        "parameters": engine.model_info.parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "rows": [row.figures() for row in rows],
    }
    Path(arguments.json).write_text(json.dumps(document, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(BARE))
    parser.add_argument("--size", choices=sorted(SIZES), default="1.8b")
    parser.add_argument("--work", nargs="+", default=["1x512", "64x1024", "512x512", "2048x256"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round after so long")
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the GPU's memory, for each engine")
    parser.add_argument("--json", help="write the results there after each round")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
