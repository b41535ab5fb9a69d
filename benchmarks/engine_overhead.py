"""Throughput of drivetrain's SGLang engine against ``sglang.Engine`` itself, on one GPU, in one run.

    python benchmarks/gpu/sglang_overhead.py [--work 1x128 64x128 512x128 2048x128 64x1024] [--rounds 3]
        [--hidden-size 1536] [--layers 28] [--vocabulary 151936] [--json FILE]

Both engines are started with the same arguments and share the GPU; a round times each once on the same requests, in
turn, and which goes first alternates. SGLang's own runs in this process, drivetrain's in its host process: what is
compared is what a trainer has of either. Every request asks for the logprobs of its tokens. Ratio is drivetrain's
throughput ÷ SGLang's, the median over rounds with its range.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model

PROMPT_TOKENS = 128


def prompts(count: int, vocabulary: int, salt: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(salt)
    return torch.randint(0, vocabulary, (count, PROMPT_TOKENS), generator=draw).tolist()  # type: ignore[no-any-return]


def arguments_of_both(share: float, most: int) -> dict[str, object]:
    sizes = [1, 8, 64, 128, 256, 512, *range(768, most + 1, 256)]
    return {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": [size for size in sizes if size <= max(most, 8)],
        "mem_fraction_static": share,
        "max_running_requests": most,
        "sleep_on_idle": True,  # or the idle one of the two would keep a core busy
    }


async def time_sglang(engine: Any, work: list[list[int]], new_tokens: int) -> float:
    began = time.perf_counter()
    params = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    results = await engine.async_generate(input_ids=work, sampling_params=params, return_logprob=True)
    elapsed = time.perf_counter() - began
    assert all(len(result["output_ids"]) == new_tokens for result in results)
    assert all(len(result["meta_info"]["output_token_logprobs"]) == new_tokens for result in results)
    return elapsed


async def time_drivetrain(engine: InferenceEngine, work: list[list[int]], new_tokens: int) -> float:
    began = time.perf_counter()
    output = await engine.generate(work, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=0))
    elapsed = time.perf_counter() - began
    assert all(len(completion.token_ids) == new_tokens for completion in output.completions)
    assert all(len(completion.logprobs or ()) == new_tokens for completion in output.completions)
    return elapsed


async def compare(own: Any, engine: InferenceEngine, batch: int, new_tokens: int, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = {"sglang": [], "drivetrain": []}
    for number in range(rounds + 1):
        for side in ("sglang", "drivetrain") if number % 2 else ("drivetrain", "sglang"):
            work = prompts(batch, engine.model_info.vocab_size, 2 * number + (side == "sglang"))
            gc.collect()
            if side == "sglang":
                elapsed = await time_sglang(own, work, new_tokens)
            else:
                elapsed = await time_drivetrain(engine, work, new_tokens)
            if number:  # The first round warms both sides up.
                times[side].append(elapsed)
    ratios = sorted(own / other for own, other in zip(times["sglang"], times["drivetrain"], strict=True))
    row: dict[str, object] = {
        "batch": batch,
        "new_tokens": new_tokens,
        "sglang_s": times["sglang"],
        "drivetrain_s": times["drivetrain"],
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "tokens_per_s": batch * new_tokens / statistics.median(times["drivetrain"]),
        "sglang_tokens_per_s": batch * new_tokens / statistics.median(times["sglang"]),
    }
    print(
        f"batch {batch:5} x {new_tokens:5}  SGLang {row['sglang_tokens_per_s']:9.0f} tok/s  "
        f"drivetrain {row['tokens_per_s']:9.0f} tok/s  ratio {row['ratio']:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f})",
        file=sys.stderr,
        flush=True,
    )
    return row


async def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    from sglang import Engine

    model = tiny_model(
        "qwen2",
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 128,
        num_key_value_heads=2,
        vocab_size=arguments.vocabulary,
        max_position_embeddings=4096,
        initializer_range=0.02,
        dtype="bfloat16",
    )
    work = [tuple(map(int, item.split("x"))) for item in arguments.work]
    same = arguments_of_both(arguments.memory_share, max(batch for batch, _ in work))
    fields = {"backend": "sglang", "model": str(model), "enable_sleep": False, "engine_kwargs": dict(same)}
    fields["gpu_memory_utilization"] = fields["engine_kwargs"].pop("mem_fraction_static")  # type: ignore[attr-defined]
    fields["max_num_seqs"] = fields["engine_kwargs"].pop("max_running_requests")  # type: ignore[attr-defined]
    fields["engine_kwargs"].pop("sleep_on_idle")  # type: ignore[attr-defined]  # drivetrain sets it itself
    fields["attention_backend"] = fields["engine_kwargs"].pop("attention_backend")  # type: ignore[attr-defined]
    async with create_engine(fields) as engine:
        print("drivetrain's engine is up", file=sys.stderr, flush=True)
        # SGLang counts what others hold of the GPU as its own share.
        same["mem_fraction_static"] = 2 * arguments.memory_share
        own = Engine(model_path=str(model), skip_tokenizer_init=True, log_level="error", **same)
        print("SGLang's own is up", file=sys.stderr, flush=True)
        rows = []
        for batch, new_tokens in work:
            rows.append(await compare(own, engine, batch, new_tokens, arguments.rounds))
            if arguments.json:
                write(arguments, engine, rows)
    own.shutdown()
    return rows


def write(arguments: argparse.Namespace, engine: InferenceEngine, rows: list[dict[str, object]]) -> None:
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": engine.versions,
        "parameters": engine.model_info.parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "rows": rows,
    }
    Path(arguments.json).write_text(json.dumps(document, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", default=["1x128", "64x128", "512x128", "2048x128", "64x1024"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the GPU's memory, for each engine")
    parser.add_argument("--json", help="write the results there after each row")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
