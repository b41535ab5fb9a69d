"""Wake-ups that find too little memory on a GPU: the engine must sleep on whole, and wake up once there is room.

    python benchmarks/gpu/scarce_memory.py {sglang,vllm} [--size 1.8b] [--ranks 1] [--left 0.3]

The engine falls asleep. Then this process takes the free memory of the last GPU but for ``--left`` GB, and asks the
engine to wake up: weights alone, cache alone, both. Each call must raise ``EngineOutOfMemory`` and leave all asleep, on
all ranks. Once the memory is free again, the engine wakes up, takes the weights, and must answer as before. That is run
with weights that are pushed after a sleep, and with weights that a sleep keeps. With ``--ranks 2`` the first of two
GPUs has room each time. Prints a line for each call, and exits with 1 if one was otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from engine_fields import sglang_fields, vllm_fields
from models import SIZES, model_folder

from drivetrain import InferenceEngine, MemoryTag, SamplingParams, create_engine
from drivetrain.errors import DrivetrainError, EngineOutOfMemory
from drivetrain_weight_sync import WeightSync

GRAPHS: Final = [1, 2]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": sglang_fields(GRAPHS, share=0.5, cache_tokens=40_000, load_format="dummy"),
    "vllm": vllm_fields(GRAPHS, share=0.05, cache_bytes=4_000_000_000, load_format="dummy"),
}
WAKES: Final = ({MemoryTag.WEIGHTS}, {MemoryTag.KV_CACHE}, {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE})
GREEDY: Final = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True, logprobs=0)


def take_all_but(left: int, device: torch.device) -> torch.Tensor:
    """Allocate the free bytes of a GPU but so many, and return what holds them."""
    free, _ = torch.cuda.mem_get_info(device)
    return torch.empty(free - left, dtype=torch.uint8, device=device)


async def answer(engine: InferenceEngine) -> tuple[list[int], list[float]]:
    completion = (await engine.generate([list(range(2, 34))], GREEDY)).completions[0]
    return list(completion.token_ids), list(completion.logprobs or [])


async def wakes_without_room(engine: InferenceEngine, left: int, device: torch.device) -> bool:
    """Ask a sleeping engine to wake up while there is no room; return True if each call was refused as it must be."""
    before, fine = engine.status, True
    taken = take_all_but(left, device)
    for tags in WAKES:
        asked = "+".join(sorted(tag.value for tag in tags))
        begun = time.perf_counter()
        try:
            await engine.wake_up(sorted(tags, key=lambda tag: tag.value))
        except DrivetrainError as error:
            is_right = isinstance(error, EngineOutOfMemory) and engine.status.asleep == before.asleep
            said = f"{type(error).__name__}: {str(error)[:400]}"
        else:
            is_right, said = False, "it woke up"
        fine &= is_right
        print(f"{'right' if is_right else 'WRONG'}  {asked}, {time.perf_counter() - begun:.2f} s: {said}", flush=True)
    del taken
    torch.cuda.empty_cache()
    return fine


async def run(args: argparse.Namespace, *, keeps_weights: bool) -> bool:
    print(f"{args.backend}, {args.ranks} ranks, weights {'kept' if keeps_weights else 'pushed'}", flush=True)
    fields = {
        "backend": args.backend,
        "model": str(args.folder),
        "dtype": "bfloat16",
        "enable_sleep": True,
        "sleep_keeps_weights": keeps_weights,
        "max_num_seqs": 16,
        "tensor_parallel_size": args.ranks,
        **ENGINES[args.backend],
    }
    device = torch.device("cuda", args.ranks - 1)
    async with create_engine(fields) as engine:
        manifest = await engine.weight_manifest()
        weights = {
            spec.name: torch.randn(spec.shape, dtype=getattr(torch, spec.dtype)).mul_(0.02) for spec in manifest.tensors
        }
        async with WeightSync.connect(weights, engine) as sync:
            await sync.push(version="first")
            first, fine = await answer(engine), True
            for number in range(2):
                await engine.sleep([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
                fine &= await wakes_without_room(engine, int(args.left * 1e9), device)
                await engine.wake_up([MemoryTag.WEIGHTS])
                if not keeps_weights:
                    await sync.push(version=f"again-{number}")
                await engine.wake_up()
                is_right = await answer(engine) == first
                fine &= is_right
                print(f"{'right' if is_right else 'WRONG'}  answers after the sleep", flush=True)
    return fine


async def main_() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--size", choices=sorted(SIZES), default="1.8b")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--left", type=float, default=0.3, help="GB that stay free (default: 0.3)")
    args = parser.parse_args()
    args.folder = Path(model_folder(args.size))
    return all([await run(args, keeps_weights=keeps) for keeps in (False, True)])


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main_()) else 1)
