"""An engine's own ways to take weights from another process's tensors on the same GPU, and to sleep.

The engine is started by itself, without drivetrain. Every function yields (what, milliseconds), medians of six after
one that warms up.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of


class Lock(Protocol):
    """Held by whoever measures on this GPU."""

    def acquire(self) -> None:
        """Wait for it."""


Figures = Iterator[tuple[str, float]]


def weights_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Random weights of the model, by checkpoint name."""
    specs = checkpoint_of(str(folder)).tensors
    return [(spec.name, torch.randn(spec.shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)) for spec in specs]


def median(work: Callable[[], object]) -> float:
    """Milliseconds."""
    work()
    taken = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def sleeps(steps: Mapping[str, Callable[[], object]]) -> Figures:
    """Time the steps of a sleep of weights and cache, in milliseconds."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(4):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            taken[name].append(1e3 * (time.perf_counter() - begun))
    for name, times in taken.items():
        yield f"native: {name}", statistics.median(times[1:])


def sglang_engine(folder: Path, settings: dict[str, Any]) -> Any:
    """SGLang by itself."""
    from sglang import Engine

    return Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        log_level="error",
        mem_fraction_static=settings["gpu_memory_utilization"],
        enable_memory_saver=True,
        attention_backend=settings["attention_backend"],
        **settings["engine_kwargs"],
    )


def sglang_sleeps(engine: Any) -> dict[str, Callable[[], object]]:
    """Its sleep of weights and cache, and the two wakes."""
    return {
        "sleep": lambda: engine.release_memory_occupation(tags=["kv_cache", "weights"]),
        "wake of the weights": lambda: engine.resume_memory_occupation(tags=["weights"]),
        "wake of the cache": lambda: engine.resume_memory_occupation(tags=["kv_cache"]),
    }


def sglang(folder: Path, settings: dict[str, Any], lock: Lock) -> Figures:
    """Each tensor, which is the default, and one flattened bucket, which is the fastest."""
    from sglang.srt.utils import MultiprocessingSerializer

    try:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    except ImportError:
        from sglang.srt.model_executor.model_runner import FlattenedTensorBucket
    engine = sglang_engine(folder, settings)
    lock.acquire()
    pairs = weights_of(folder)
    yield "native: each tensor", median(lambda: engine.update_weights_from_tensor(pairs, flush_cache=True))

    def send(bucket: Any) -> None:
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        serialized = MultiprocessingSerializer.serialize(payload, output_str=True)
        engine.update_weights_from_tensor([serialized], load_format="flattened_bucket")

    try:
        yield "native: one flattened bucket", median(lambda: send(FlattenedTensorBucket(named_tensors=pairs)))
        filled = FlattenedTensorBucket(named_tensors=pairs)
        yield "native: one bucket, flattened before", median(lambda: send(filled))
    except Exception as error:  # its calling conventions change between releases; the figure is then missing
        print(f"no flattened bucket: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    yield from sleeps(sglang_sleeps(engine))
    engine.shutdown()


class Extension:
    """In vLLM's worker: what its own IPC engine does with the handles, which would import ray."""

    model_runner: Any
    device: Any

    def load_handles(self, pickled: bytes, layerwise: bool) -> None:
        """Load tensors of another process."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        weights = [
            (name, rebuild(*arguments[:6], self.device.index, *arguments[7:]))
            for name, (rebuild, arguments) in pickle.loads(pickled)
        ]
        if layerwise:
            initialize_layerwise_reload(model)
        model.load_weights(weights)
        if layerwise:
            finalize_layerwise_reload(model, self.model_runner.model_config)
        torch.cuda.synchronize()


def vllm_engine(folder: Path, settings: dict[str, Any]) -> Any:
    """vLLM by itself."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork may find CUDA in use
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        gpu_memory_utilization=settings["gpu_memory_utilization"],
        max_model_len=4096,
        worker_extension_cls="native_updates.Extension",
        **settings["engine_kwargs"],
    )


def vllm_sleeps(engine: Any) -> dict[str, Callable[[], object]]:
    """Its sleep of weights and cache, and the two wakes."""
    return {
        "sleep": lambda: engine.sleep(level=2),
        "wake of the weights": lambda: engine.wake_up(tags=["weights"]),
        "wake of the cache": lambda: engine.wake_up(tags=["kv_cache"]),
    }


def vllm(folder: Path, settings: dict[str, Any], lock: Lock) -> Figures:
    """As its IPC engine does, which makes parameters anew; and its loader alone, into those that are there."""
    engine = vllm_engine(folder, settings)
    lock.acquire()
    pairs = weights_of(folder)

    def send(layerwise: bool) -> None:
        handles = pickle.dumps([(name, reduce_tensor(tensor)) for name, tensor in pairs])
        engine.collective_rpc("load_handles", args=(handles, layerwise))

    yield "native: its IPC engine's way", median(lambda: send(True))
    yield "native: its loader alone", median(lambda: send(False))
    yield from sleeps(vllm_sleeps(engine))


NATIVE: Final[dict[str, Callable[[Path, dict[str, Any], Lock], Iterable[tuple[str, float]]]]] = {
    "sglang": sglang,
    "vllm": vllm,
}
