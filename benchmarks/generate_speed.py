"""The embedded backend's speed beside transformers' own ways to generate, on one model in one process.

    python benchmarks/generate_speed.py [--model PATH] [--layers 28] [--batch 64 512] [--tokens 128] [--rounds 3]
        [--without continuous] [--lock FILE]

Each way samples ``--tokens`` tokens after each prompt, at temperature 1 from the whole vocabulary; prompts have 32 to
96 tokens. Ways take turns. Prints tokens/s, the median of the rounds, and its ratio to the fastest of transformers'
own:

- drivetrain: an engine of the transformers backend, inline and in a process of its own, where it decodes with CUDA
  graphs; without logprobs and with them.
- generate: ``model.generate`` on the left-padded batch.
- continuous: ``model.generate_batch``, its continuous batching, with attention by ``paged|sdpa``. The first call of
  each batch is not timed, and its manager is kept.

The model is a Qwen2 of 1.4 billion parameters in bfloat16 with random weights, unless one is given.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from turns import turn

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: Final = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
Way = Callable[[list[list[int]]], Awaitable[int]]
"""Generates for all prompts; returns the number of tokens."""


def prompts_of(count: int) -> list[list[int]]:
    """Return prompts of 32 to 96 tokens."""
    draw = torch.Generator().manual_seed(count)
    lengths = torch.randint(32, 97, (count,), generator=draw).tolist()
    return [torch.randint(1, 250, (length,), generator=draw).tolist() for length in lengths]


def engine_way(engine: InferenceEngine, tokens: int, *, logprobs: bool) -> Way:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, logprobs=0 if logprobs else None)

    async def run(prompts: list[list[int]]) -> int:
        output = await engine.generate(prompts, params)
        return sum(len(completion.token_ids) for completion in output.completions)

    return run


def generate_way(model: PreTrainedModel, tokens: int) -> Way:
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0)
    config.eos_token_id = None

    async def run(prompts: list[list[int]]) -> int:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
        )
        with torch.inference_mode():
            found = model.generate(padded, attention_mask=mask, generation_config=config)
        return (found.shape[1] - longest) * len(prompts)

    return run


def continuous_way(model: PreTrainedModel, tokens: int) -> Way:
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
    memory = ContinuousBatchingConfig(max_memory_percent=0.5)  # other engines may share the GPU

    async def run(prompts: list[list[int]]) -> int:
        found = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=memory, persistent_manager=True
        )
        if len(found) != len(prompts):
            raise RuntimeError(f"continuous batching answered {len(found)} of {len(prompts)} prompts")
        return sum(len(answer.generated_tokens) for answer in found.values())

    return run


async def measure(given: argparse.Namespace, folder: Path) -> None:
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16 if DEVICE == "cuda" else torch.float32, "device_map": DEVICE}
    fields: dict[str, Any] = {"model": str(folder), "max_num_seqs": max(given.batch), "enable_prefix_caching": False}
    async with (
        create_engine("transformers", isolation="inline", **fields) as inline,
        create_engine("transformers", isolation="process", **fields) as hosted,
    ):
        own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **kwargs)
        paged = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="paged|sdpa", **kwargs)
        ways = {
            "drivetrain, inline": engine_way(inline, given.tokens, logprobs=False),
            "drivetrain, inline, logprobs": engine_way(inline, given.tokens, logprobs=True),
            "drivetrain, process": engine_way(hosted, given.tokens, logprobs=False),
            "drivetrain, process, logprobs": engine_way(hosted, given.tokens, logprobs=True),
            "generate": generate_way(own, given.tokens),
            "continuous": continuous_way(paged, given.tokens),
        }
        ways = {name: way for name, way in ways.items() if name not in given.without}
        with turn(given.lock):
            for count in given.batch:
                await measure_batch(ways, prompts_of(count), given.rounds)
                paged.destroy_cached_continuous_batching_manager()  # it is made for the size of its first call


async def measure_batch(ways: dict[str, Way], prompts: list[list[int]], rounds: int) -> None:
    rates: dict[str, list[float]] = {}
    for index in range(rounds + 1):
        for name, way in list(ways.items()):
            begun = time.perf_counter()
            try:
                tokens = await way(prompts)
            except Exception as error:  # transformers' own way fails: said in its row
                print(f"batch {len(prompts):4}  {name:30} fails: {type(error).__name__}: {error}"[:400], flush=True)
                del ways[name]
                continue
            if index:
                rates.setdefault(name, []).append(tokens / (time.perf_counter() - begun))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    theirs = max((rate for name, rate in medians.items() if not name.startswith("drivetrain")), default=0.0)
    for name, rate in medians.items():
        ratio = f"{rate / theirs:6.2f} x the fastest of transformers' own" if theirs else ""
        print(f"batch {len(prompts):4}  {name:30} {rate:10.0f} tokens/s {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="+", default=[], metavar="WAY", help="do not run these")
    parser.add_argument("--lock", metavar="FILE")
    given = parser.parse_args()
    sizes = {**SIZES, "num_hidden_layers": given.layers}
    asyncio.run(measure(given, given.model or tiny_model("qwen2", dtype="bfloat16", **sizes)))


if __name__ == "__main__":
    main()
