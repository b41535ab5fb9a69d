"""Throughput of a teacher against bare prefill, in turns in one engine, so that a busy machine slows both.

    python benchmarks/teacher_scoring.py BACKEND [--model PATH] [--batch 64] [--tokens 256] [--ids 64] [--rounds 8]
        [--fields JSON] [--lock FILE]

Bare prefill runs the same sequences with max_new_tokens=0, which needs the model's head at the last token alone. A
teacher scores given ids, at a temperature, at the last quarter of each sequence's positions, and at all of them; and it
scores all of them and generates a token, in one request of the engine and in two. No prefix is cached unless --fields
say so.

Prints tokens/s of each, and the median, over the rounds, of a teacher's rate as a share of the same round's prefill.
Inline, the share is also computed from CPU time, which other work on the machine does not change. Without a model it
makes a small one: --vocabulary, --hidden and --layers are its sizes. --fields are more fields of the engine's
configuration. With --lock, of the runs that share a machine only one measures at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import numpy as np
from turns import turn

from drivetrain import InferenceEngine, Isolation, create_engine
from drivetrain.testing import tiny_model

Run = Callable[[], Awaitable[object]]
Spent = tuple[float, float]
"""Seconds, and seconds of CPU time of this process."""

TOKEN = {"max_new_tokens": 1, "temperature": 1.0}


def kinds(engine: InferenceEngine, given: argparse.Namespace) -> dict[str, Run]:
    """Return what is compared: bare prefill first."""
    rng, quarter = np.random.default_rng(0), given.tokens // 4
    vocabulary, last = engine.model_info.vocab_size, min(engine.model_info.vocab_size, 250)
    sequences: list[list[int]] = rng.integers(1, last, size=(given.batch, given.tokens)).tolist()
    every = rng.integers(0, vocabulary, size=(given.batch, given.tokens, given.ids), dtype=np.int32)
    late = every[:, -quarter:]

    async def in_two() -> None:
        await engine.compute_logprobs(sequences, at=every)
        await engine.generate(sequences, TOKEN)

    return {
        "prefill": lambda: engine.generate(sequences, {"max_new_tokens": 0}),
        "last quarter": lambda: engine.compute_logprobs(sequences, at=late, last_n=quarter, temperature=2.0),
        "all positions": lambda: engine.compute_logprobs(sequences, at=every, temperature=2.0),
        "prompt logprobs": lambda: engine.compute_logprobs(sequences),
        "and a token": lambda: engine.compute_logprobs(sequences, at=every, sampling_params=TOKEN),
        "in two requests": in_two,
    }


async def spent(run: Run) -> Spent:
    """Time one call."""
    begun, cpu = time.perf_counter(), time.process_time()
    await run()
    return time.perf_counter() - begun, time.process_time() - cpu


def share(found: dict[str, list[Spent]], kind: str, clock: int) -> float:
    """Return the median share of bare prefill's rate, by one of the clocks."""
    return statistics.median(bare[clock] / own[clock] for bare, own in zip(found["prefill"], found[kind], strict=True))


async def measured(engine: InferenceEngine, given: argparse.Namespace) -> dict[str, list[Spent]]:
    """Time each kind in turns, after one call of each."""
    each = kinds(engine, given)
    found: dict[str, list[Spent]] = {kind: [] for kind in each}
    for run in each.values():
        await run()
    for turn_of in range(given.rounds):
        for kind in list(each)[:: -1 if turn_of % 2 else 1]:
            found[kind].append(await spent(each[kind]))
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("backend")
    parser.add_argument("--model")
    for name, value in (("batch", 64), ("tokens", 256), ("ids", 64), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("vocabulary", 260), ("hidden", 128), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fields", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--lock", metavar="FILE")
    given = parser.parse_args()
    model = given.model or str(
        tiny_model(
            "qwen2",
            vocab_size=given.vocabulary,
            hidden_size=given.hidden,
            intermediate_size=4 * given.hidden,
            num_attention_heads=given.hidden // 64,
            num_key_value_heads=given.hidden // 64,
            num_hidden_layers=given.layers,
        )
    )
    fields = {"enable_prefix_caching": False, **given.fields}
    async with create_engine(given.backend, model=model, **fields) as engine:
        with turn(given.lock):
            found = await measured(engine, given)
        inline = engine.isolation is Isolation.INLINE
    print(f"{given.backend}, {given.batch} sequences of {given.tokens} tokens, {given.ids} ids per position")
    print(f"  {'without --model: ' if not given.model else given.model}", end="")
    print(
        f"vocabulary {given.vocabulary}, hidden size {given.hidden}, {given.layers} layers" if not given.model else ""
    )
    for kind, times in found.items():
        rate = given.batch * given.tokens / statistics.median(seconds for seconds, _ in times)
        by_cpu = f", {share(found, kind, 1):.3f} by CPU time" if inline else ""
        print(f"  {kind:16} {rate:9.0f} tokens/s  {share(found, kind, 0):.3f} of prefill{by_cpu}")


if __name__ == "__main__":
    asyncio.run(main())
