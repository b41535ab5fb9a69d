"""Many pushes leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psutil

from drivetrain.engine.engine import InferenceEngine
from drivetrain.testing import tiny_model
from drivetrain.types.capability import Capability
from drivetrain_conformance.assertions.leftovers import (
    Holdings,
    check_nothing_left,
    temporary_folder,
)
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, counted_of, held_bytes, mappings_of
from drivetrain_conformance.assets.weight_sources import (
    tensors_of,
)
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import Strategy, WeightSync


@case(Capability.WEIGHTS_IN_PROCESS, own_engine=True, slow=True)
async def many_pushes_in_process_leave_nothing_behind(bench: Bench) -> None:
    """Repeated in-process pushes leak no memory, descriptors or files."""
    await _push_many(bench, [Strategy.IN_PROCESS])


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK, own_engine=True, slow=True)
async def many_pushes_on_one_host_leave_nothing_behind(bench: Bench) -> None:
    """Repeated pushes through shared memory and folders leak no memory, descriptors or files."""
    await _push_many(bench, [Strategy.SHARED_MEMORY, Strategy.DISK])


@case(Capability.WEIGHTS_CUDA_IPC, own_engine=True, hardware=Hardware.GPU)
async def many_pushes_through_gpu_memory_leave_nothing_behind(bench: Bench) -> None:
    """Repeated pushes through GPU memory leak no memory on either side, descriptors or files."""
    await _push_many(bench, [Strategy.CUDA_IPC], device="cuda")


ARENA: Final = "memfd:drivetrain-weights"
"""Name under which the system shows a trainer's memory that an engine maps."""


GROWTH: Final = 16 * 1024
"""Bytes by which memory may grow per push: allocator overhead."""


async def _push_many(bench: Bench, strategies: Sequence[Strategy], device: str = "cpu") -> None:
    """Push a model of a few megabytes repeatedly, and check for leaks."""
    folder = tiny_model("qwen2", dtype=bench.models.dtype, hidden_size=128, intermediate_size=1024)
    tensors, cycles = tensors_of(folder), max(20, bench.profile.cycles)
    engine = bench.create(model=folder)
    syncs = [WeightSync.connect(tensors, engine, strategy, bucket_bytes=1 << 20) for strategy in strategies]
    tensors.update({name: tensor.to(device) for name, tensor in tensors.items()})
    with temporary_folder(bench.folder("pushes")):
        at_first = Holdings.now()
        async with engine:
            for sync in syncs:
                async with sync:
                    for _ in range(5):
                        await sync.push(version="warm-up")
                    held, weights = Holdings.now(), (await engine.stats()).weight_bytes
                    some = cycles // 10

                    async def held_after_some(sync: WeightSync = sync, some: int = some) -> dict[str, int]:
                        for step in range(some):
                            await sync.push(version=f"step-{step}")
                        return {"bytes of memory": _memory(engine), **counted_of(engine)}

                    room = {"bytes of memory": GROWTH * some, **COUNTED}
                    await check_steady(held_after_some, room, f"{some} pushes", measurements=10)
                    await check_nothing_left(held)
                    assert (await engine.stats()).weight_bytes == weights
                mapped = mappings_of(engine, ARENA)
                assert not mapped, f"the trainer's memory is still mapped {mapped} times once it is done"
        await check_nothing_left(at_first)


def _memory(engine: InferenceEngine) -> int:
    """Return the engine's memory, plus the trainer's unless the engine runs in the trainer's process."""
    is_here = engine.host_pid is None and not engine.model_info.device.startswith("cuda")
    return held_bytes(engine) + (0 if is_here else psutil.Process().memory_info().rss)
