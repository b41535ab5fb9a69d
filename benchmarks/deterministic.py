"""Measure the cost of deterministic=True on the transformers backend: tokens per second with and without it.

    python benchmarks/deterministic.py [--hidden 128] [--layers 2] [--batch 1 8 64] [--tokens 64] [--rounds 3]

Two inline engines on the CPU take turns on the same requests: one computes all rows in one forward pass, the other each
row alone. Prompts have 32 to 96 tokens, and none is cached. A last row is prefill: prompts of 512 tokens, one new
token each. Rates are medians of the rounds, by the clock and by CPU time, which other processes change less.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

import torch

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model

Prompts = Sequence[Sequence[int]]


def prompts_of(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return random prompts of between so many tokens."""
    draw = torch.Generator().manual_seed(count)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(1, 250, (length,), generator=draw).tolist() for length in lengths]


async def rates(engine: InferenceEngine, prompts: Prompts, tokens: int, counted: int) -> tuple[float, float]:
    """Return ``counted`` tokens per second, by the clock and by CPU time."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, logprobs=0, seed=1)
    begun, cpu = time.perf_counter(), time.process_time()
    await engine.generate([list(prompt) for prompt in prompts], params)
    return counted / (time.perf_counter() - begun), counted / (time.process_time() - cpu)


async def compare(engines: Sequence[InferenceEngine], name: str, prompts: Prompts, tokens: int, rounds: int) -> None:
    """Print the rates of the normal and the deterministic engine, and their ratios."""
    counted = tokens * len(prompts) if tokens > 1 else sum(map(len, prompts))
    found: list[list[tuple[float, float]]] = [[], []]
    for index in range(rounds + 1):
        for engine, own in zip(engines, found, strict=True):
            measured = await rates(engine, prompts, tokens, counted)
            if index:
                own.append(measured)
    (clock, cpu), (slow_clock, slow_cpu) = (
        [statistics.median(column) for column in zip(*own, strict=True)] for own in found
    )
    print(
        f"{name:10} {clock:9.0f} tokens/s, deterministic {slow_clock:9.0f}: {slow_clock / clock:.3f}, "
        f"by CPU time {slow_cpu / cpu:.3f}",
        flush=True,
    )


async def measure(given: argparse.Namespace) -> None:
    model = tiny_model(
        "qwen2",
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=given.hidden // 64,
    )
    fields: dict[str, object] = {"backend": "transformers", "model": str(model), "device": "cpu", "isolation": "inline"}
    fields["enable_prefix_caching"] = False
    async with create_engine(fields) as normal, create_engine({**fields, "deterministic": True}) as deterministic:
        print(f"hidden size {given.hidden}, {given.layers} layers, {normal.model_info.parameters:,} parameters")
        engines = normal, deterministic
        for count in given.batch:
            prompts = prompts_of(count, 32, 96)
            await compare(engines, f"batch {count}", prompts, given.tokens, given.rounds)
        await compare(engines, "prefill", prompts_of(4, 512, 512), 1, given.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
