"""Check the transformers backend on a GPU: memory given back, copies kept, logprobs, weight pushes.

    python benchmarks/gpu/transformers_backend.py [--json]

Prints one line per check with its figures; exits 1 if a check fails. Needs one CUDA GPU.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain import EngineState, InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import WeightSync

RESULTS: list[dict[str, object]] = []


def record(check: str, ok: bool, **figures: object) -> None:
    RESULTS.append({"check": check, "ok": ok, **figures})
    print("ok  " if ok else "FAIL", check, figures, file=sys.stderr, flush=True)


def used_mib() -> float:
    """Memory in use on the GPU by every process, in MiB."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


async def gap(engine: InferenceEngine, policy: PreTrainedModel) -> float:
    """Largest difference between the engine's logprobs and an independent forward pass of ``policy``."""
    params = SamplingParams(max_new_tokens=48, logprobs=0, n=2, ignore_eos=True, seed=3)
    output = await engine.generate(["a prompt", "another prompt that is longer", "x"], params)
    worst = 0.0
    for completion in output.completions:
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids], device=policy.device)
        with torch.no_grad():
            logits = policy(input_ids=ids, use_cache=False).logits[0, len(completion.prompt_token_ids) - 1 : -1].float()
        drawn = torch.tensor(completion.token_ids, device=policy.device)
        expected = logits.log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        worst = max(worst, (torch.tensor(completion.logprobs, device=policy.device) - expected).abs().max().item())
    return worst


async def logprobs(dtype: str, tolerance: float) -> None:
    for architecture in ("qwen2", "gemma2", "mixtral"):
        folder = tiny_model(architecture, dtype=dtype)
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda")
        async with create_engine("transformers", model=str(folder), isolation="inline") as engine:
            worst = await gap(engine, policy)
            record(f"logprobs {architecture} {dtype}", worst < tolerance, max_gap=worst, tolerance=tolerance)


async def memory(folder: Path, isolation: str, *, keeps: bool) -> None:
    config = {"model": str(folder), "isolation": isolation, "sleep_keeps_weights": keeps}
    async with create_engine("transformers", **config) as engine:
        params = SamplingParams(max_new_tokens=64, temperature=0, ignore_eos=True)
        first = await engine.generate(["a prompt of some length"] * 8, params)
        awake, stats = used_mib(), await engine.stats()
        began = time.perf_counter()
        await engine.sleep()
        slept = time.perf_counter() - began
        asleep = used_mib()
        began = time.perf_counter()
        await engine.wake_up()
        woke = time.perf_counter() - began
        given_back, held = awake - asleep, stats.weight_bytes / 2**20
        name = f"sleep {isolation}{' keeping weights' if keeps else ''}"
        ok = given_back > 0.95 * held
        if keeps:
            again = await engine.generate(["a prompt of some length"] * 8, params)
            ok &= [c.token_ids for c in again.completions] == [c.token_ids for c in first.completions]
        else:
            ok &= engine.state is EngineState.DIRTY
            policy = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", device_map="cuda")
            async with WeightSync.connect(policy, engine) as sync:
                await sync.push(version="awake")
            again = await engine.generate(["a prompt of some length"] * 8, params)
            ok &= [c.token_ids for c in again.completions] == [c.token_ids for c in first.completions]
            del policy
        record(name, ok, weights_mib=held, given_back_mib=given_back, sleep_ms=slept * 1e3, wake_ms=woke * 1e3,
               host_rss_mib=psutil.Process(engine.host_pid).memory_info().rss / 2**20)  # fmt: skip


async def push(folder: Path, isolation: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", device_map="cuda")
    async with (
        create_engine("transformers", model=str(folder), isolation=isolation) as engine,
        WeightSync.connect(policy, engine) as sync,
    ):
        times = []
        for step in range(6):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.001)
            torch.cuda.synchronize()
            began = time.perf_counter()
            await sync.push(version=f"step-{step}")
            times.append((time.perf_counter() - began) * 1e3)
        nbytes = sum(parameter.nbytes for parameter in policy.parameters())
        source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        limit = (time.perf_counter() - began) * 1e3
        worst = await gap(engine, policy)
        median = sorted(times)[len(times) // 2]
        record(f"push {isolation}", worst < 0.35, gb=nbytes / 1e9, median_ms=median, first_ms=times[0],
               device_copy_ms=limit, times_the_limit=median / limit, max_gap_bf16=worst)  # fmt: skip


async def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, file=sys.stderr)
    await logprobs("float32", 2e-3)
    await logprobs("bfloat16", 0.35)
    folder = tiny_model(
        "qwen2", dtype="bfloat16", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, initializer_range=0.02,
    )  # fmt: skip
    for isolation in ("inline", "process"):
        for keeps in (False, True):
            before = used_mib()
            await memory(folder, isolation, keeps=keeps)
            gc.collect()
            torch.cuda.empty_cache()
            left = used_mib() - before
            record(f"memory left behind after teardown {isolation}", left < 600, left_mib=left)
        await push(folder, isolation)
    if "--json" in sys.argv:
        document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": RESULTS}
        print(json.dumps(document, indent=2))
    sys.exit(0 if all(result["ok"] for result in RESULTS) else 1)


if __name__ == "__main__":
    asyncio.run(main())
