"""Throughput with sampling masks and without, in turns in one engine, so that a busy machine slows both.

    python benchmarks/sampling_mask.py BACKEND [--model PATH] [--batch 512] [--tokens 128] [--rounds 8]
        [--returns sampling_mask routed_experts] [--fields JSON] [--lock FILE]

Prints tokens/s of both, and the ratio of the medians. Without a model it makes a tiny one. --returns names what is
asked for, all at once. --fields are more fields of the engine's configuration. With --lock, of the runs that share a
machine only one measures at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from turns import turn

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model


async def rate(engine: InferenceEngine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of one call."""
    begun = time.perf_counter()
    output = await engine.generate(prompts, params)
    return sum(len(completion.token_ids) for completion in output.completions) / (time.perf_counter() - begun)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("backend")
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--returns", nargs="+", default=["sampling_mask"])
    parser.add_argument("--fields", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--lock", metavar="FILE")
    given = parser.parse_args()
    plain = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True, top_k=given.top_k, top_p=given.top_p)
    kinds = {"without": plain, "with": plain.model_copy(update={f"return_{name}": True for name in given.returns})}
    prompts = [[1 + index % 200, 2, 3, 4] for index in range(given.batch)]
    model = given.model or str(tiny_model("qwen2"))
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    async with create_engine(given.backend, model=model, max_num_seqs=given.batch, **given.fields) as engine:
        with turn(given.lock):
            for params in kinds.values():
                await rate(engine, prompts, params)
            for index in range(given.rounds):
                for kind in sorted(kinds, reverse=bool(index % 2)):
                    rates[kind].append(await rate(engine, prompts, kinds[kind]))
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    print(
        f"{given.backend}, batch {given.batch}, {model}: {medians['without']:.0f} tokens/s without, "
        f"{medians['with']:.0f} with {', '.join(given.returns)}: ratio {medians['with'] / medians['without']:.3f}"
    )


if __name__ == "__main__":
    asyncio.run(main())
