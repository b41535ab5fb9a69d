"""Weight updates of a colocated engine on one GPU, beside one copy of the same bytes, and the engine's own ways.

    python benchmarks/gpu/weight_sync.py {sglang,vllm} [--size 7b|1.8b|moe] [--pushes 12] [--native] [--json FILE]

The trainer's tensors and the engine, in its host process, are on one GPU; weights are bfloat16, at random, of a Qwen2
of 7.6 or 1.8 billion parameters, or of a Qwen3 MoE with 64 experts. Every push is verified. In milliseconds, medians:

- C: one device-to-device copy of the same bytes, measured before and after.
- push: from ``push()`` to its return: digests and copies on the trainer's side, then the update.
- staged update: from ``finish()`` of a transfer that was staged while the engine served on, to its return.
- pause: what eight streams wait for longer than usual for a token, if a push comes upon them (``in_place``).
- staging: tokens of those streams while a transfer is staged, again and again, in times of those without.
- sleep and wake: of weights and cache, and the push after it.
- native (SGLang): the engine itself, started by itself: each tensor, and flattened buckets.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import torch

from drivetrain import InferenceEngine, MemoryTag, PauseMode, SamplingParams, create_engine
from drivetrain.errors import DrivetrainError
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import WeightSync
from drivetrain_weight_sync.checkpoint import checkpoint_of

SIZES: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "7b": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "1.8b": (
        "qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
    ),
    "tiny": ("qwen2", {"hidden_size": 128, "num_hidden_layers": 4}),
    "moe": (
        "qwen3_moe",
        {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 512,
            "num_experts": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 32000,
        },
    ),
}
STREAMS: Final = 8
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS: Final = [1, 2, 4, 8]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": {
        "attention_backend": "triton",
        "engine_kwargs": {
            "load_format": "dummy",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": GRAPHS,
        },
    },
    "vllm": {
        "engine_kwargs": {
            "load_format": "dummy",
            "optimization_level": 0,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": GRAPHS,
            },
            "kernel_config": {"enable_flashinfer_autotune": False},
        },
    },
}


def model_folder(size: str) -> Path:
    """A folder with the configuration of a model of that size and no weights: the engine makes its own."""
    architecture, fields = SIZES[size]
    folder = Path(tempfile.mkdtemp(prefix="weight-sync-")) / size
    tiny_model(architecture, directory=folder, dtype="bfloat16", max_position_embeddings=4096)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][0]] * fields["num_hidden_layers"]
    file.write_text(json.dumps(config))
    return folder


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def copy_ms(nbytes: int) -> float:
    one = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(one)
    taken = []
    for _ in range(10):
        synchronize()
        begun = time.perf_counter()
        other.copy_(one)
        synchronize()
        taken.append(time.perf_counter() - begun)
    del one, other
    torch.cuda.empty_cache()
    return 1e3 * statistics.median(taken)


async def timed(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begun)


def show(name: str, milliseconds: float, c: float) -> None:
    print(f"{name:42} {milliseconds:9.2f} ms  {milliseconds / c:6.2f} C", file=sys.stderr, flush=True)


class Streams:
    """Eight requests that are answered token by token; notes when each came."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.came: list[list[float]] = [[] for _ in range(STREAMS)]
        self._first = asyncio.Barrier(STREAMS + 1)

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(STREAMS)]
        async with asyncio.timeout(60):
            await self._first.wait()
        return self

    async def _read(self, index: int) -> None:
        params = SamplingParams(max_new_tokens=3000, ignore_eos=True, temperature=1.0, logprobs=0)
        async for _ in self._engine.generate_stream([[1 + index, 2, 3, 4]], params):
            self.came[index].append(time.perf_counter())
            if len(self.came[index]) == 1:
                await self._first.wait()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def between(self, begin: float, end: float) -> int:
        """Tokens that came then."""
        return sum(begin <= moment < end for moments in self.came for moment in moments)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens of one stream, of which the later came then."""
        return [
            1e3 * (later - earlier)
            for moments in self.came
            for earlier, later in itertools.pairwise(moments)
            if begin <= later < end
        ]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, float] = {}
    folder = model_folder(args.size)
    fields = {
        "backend": args.backend,
        "model": str(folder),
        "dtype": "bfloat16",
        "enable_sleep": True,
        "gpu_memory_utilization": args.memory_share,
        "max_num_seqs": 16,
        **ENGINES[args.backend],
    }
    async with create_engine(fields) as engine:
        print("the engine is up", file=sys.stderr, flush=True)
        manifest = await engine.weight_manifest()
        weights = {
            spec.name: torch.randn(spec.shape, device=DEVICE, dtype=getattr(torch, spec.dtype)).mul_(0.02)
            for spec in manifest.tensors
        }
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        await engine.generate([[1, 2, 3, 4]] * STREAMS, SamplingParams(max_new_tokens=16, ignore_eos=True))  # warms up
        c = copy_ms(nbytes)
        show(f"C: {nbytes / 1e9:.2f} GB, {len(weights)} tensors", c, c)
        async with WeightSync.connect(weights, engine, mode=PauseMode.IN_PLACE) as sync:

            def record(name: str, milliseconds: float) -> None:
                figures[name] = milliseconds
                show(name, milliseconds, c)

            record("first push", await timed(sync.push(version="first")))
            pushes = [await sync.push(version=f"push-{number}") for number in range(args.pushes)]
            record("push", 1e3 * statistics.median(result.total_seconds for result in pushes))
            record(
                "  of that: look and stage", 1e3 * statistics.median(r.check_seconds + r.stage_seconds for r in pushes)
            )
            record("  of that: update", 1e3 * statistics.median(result.update_seconds for result in pushes))
            staged: list[float] = []
            for number in range(args.pushes):
                handle = await sync.start_weight_transfer(version=f"staged-{number}")
                await handle.wait()
                staged.append(await timed(handle.finish()))
            record("staged update", statistics.median(staged))
            await measure_streams(engine, sync, record, args.pushes)
            await measure_sleep(engine, sync, record)
            for tensor in weights.values():
                tensor.mul_(-1.5)
            await sync.push(version="another")
            report = await engine.check_weight_sync_integrity("another")
            print(f"integrity after all: {report}", file=sys.stderr, flush=True)
        figures["C"] = c
        figures["C after"] = copy_ms(nbytes)
        versions = engine.versions
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "backend": args.backend,
        "versions": versions,
        "strategy": sync.strategy.value,
        "tensors": len(weights),
        "gb": nbytes / 1e9,
        "ms": figures,
    }


async def measure_streams(
    engine: InferenceEngine, sync: WeightSync, record: Callable[[str, float], None], pushes: int
) -> None:
    async with Streams(engine) as streams:
        begun = time.perf_counter()
        await asyncio.sleep(1.0)
        usual, rate = streams.gaps(begun, time.perf_counter()), streams.between(begun, time.perf_counter())
        record("eight streams: usual time between tokens", statistics.median(usual))
        extra: list[float] = []
        try:
            for number in range(pushes):
                begun = time.perf_counter()
                handle = await sync.start_weight_transfer(version=f"stream-{number}")
                await handle.wait()
                begun = time.perf_counter()
                await handle.finish()
                await asyncio.sleep(0.05)
                extra.append(max(streams.gaps(begun, time.perf_counter())) - statistics.median(usual))
        except DrivetrainError as error:
            print(f"no update upon streams: {error}", file=sys.stderr, flush=True)
        else:
            record("eight streams: longer for an update", statistics.median(extra))
    async with Streams(engine) as streams:
        begun = time.perf_counter()
        await asyncio.sleep(1.0)
        rate = streams.between(begun, time.perf_counter())
        begun, transfers = time.perf_counter(), 0
        while time.perf_counter() < begun + 1.0:
            handle = await sync.start_weight_transfer(version="never")
            await handle.wait()
            await handle.cancel()
            transfers += 1
        meanwhile = streams.between(begun, time.perf_counter()) / (time.perf_counter() - begun)
        print(
            f"{transfers} transfers staged beside eight streams: {meanwhile / rate:.3f} of their tokens",
            file=sys.stderr,
        )
        record("eight streams: ms a token, staging on and on", 1e3 * STREAMS / meanwhile)
        record("eight streams: ms a token, without", 1e3 * STREAMS / rate)


async def measure_sleep(engine: InferenceEngine, sync: WeightSync, record: Callable[[str, float], None]) -> None:
    taken: dict[str, list[float]] = {
        "sleep": [],
        "wake of the weights": [],
        "push after it": [],
        "wake of the cache": [],
    }
    for number in range(4):
        taken.setdefault("sleep", []).append(await timed(engine.sleep([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])))
        taken.setdefault("wake of the weights", []).append(await timed(engine.wake_up([MemoryTag.WEIGHTS])))
        taken.setdefault("push after it", []).append(await timed(sync.push(version=f"awake-{number}")))
        taken.setdefault("wake of the cache", []).append(await timed(engine.wake_up([MemoryTag.KV_CACHE])))
    for name, times in taken.items():
        record(name, statistics.median(times[1:]))


def native_sglang(size: str, share: float, c: float) -> dict[str, float]:
    """SGLang's own ways, from another process's tensors on the same GPU, as its users call them."""
    from sglang import Engine

    folder = model_folder(size)
    engine = Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        log_level="error",
        mem_fraction_static=min(0.9, share + 0.2),
        enable_memory_saver=True,
        **ENGINES["sglang"]["engine_kwargs"],
        attention_backend="triton",
    )
    specs = checkpoint_of(str(folder)).tensors
    pairs = [(spec.name, torch.randn(spec.shape, device=DEVICE, dtype=torch.bfloat16).mul_(0.02)) for spec in specs]

    def update(**how: Any) -> None:
        engine.update_weights_from_tensor(pairs, flush_cache=True, **how)
        synchronize()

    def median(work: Callable[[], None]) -> float:
        work()
        taken = []
        for _ in range(6):
            synchronize()
            begun = time.perf_counter()
            work()
            taken.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(taken)

    found = {"native: each tensor": median(update)}
    show("native: each tensor", found["native: each tensor"], c)
    try:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    except ImportError:
        from sglang.srt.model_executor.model_runner import FlattenedTensorBucket
    from sglang.srt.utils import MultiprocessingSerializer

    def flattened() -> None:
        bucket = FlattenedTensorBucket(named_tensors=pairs)
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        engine.update_weights_from_tensor(
            [MultiprocessingSerializer.serialize(payload, output_str=True)], load_format="flattened_bucket"
        )
        synchronize()

    try:
        found["native: one flattened bucket"] = median(flattened)
        show("native: one flattened bucket", found["native: one flattened bucket"], c)
        filled = FlattenedTensorBucket(named_tensors=pairs)
        ready = {"flattened_tensor": filled.get_flattened_tensor(), "metadata": filled.get_metadata()}

        def flattened_before() -> None:
            engine.update_weights_from_tensor(
                [MultiprocessingSerializer.serialize(ready, output_str=True)], load_format="flattened_bucket"
            )
            synchronize()

        found["native: one bucket, flattened before"] = median(flattened_before)
        show("native: one bucket, flattened before", found["native: one bucket, flattened before"], c)
    except Exception as error:  # its calling conventions change between releases; the figure is then missing
        print(f"no flattened bucket: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    engine.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--pushes", type=int, default=12)
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU's memory, for the engine")
    parser.add_argument("--native", action="store_true", help="also SGLang by itself")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    document = asyncio.run(measure(args))
    if args.native:
        document["native_ms"] = native_sglang(args.size, args.memory_share, document["ms"]["C"])
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
