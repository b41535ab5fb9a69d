"""How much memory an engine holds, as the system sees it: what an engine says of itself proves nothing."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import psutil

from drivetrain.engine.engine import InferenceEngine
from drivetrain_weight_sync.receiver.cpu_sleep import trim_heap

SERIES: Final = 3
"""Series of measurements after which what still grows is a leak."""


def held_bytes(engine: InferenceEngine) -> int:
    """Memory that is held now: of the GPUs where the engine is on one, otherwise of the engine's processes."""
    if engine.model_info.device.startswith("cuda"):
        return sum(held_by_device())
    gc.collect()  # an engine in this process is not to blame for the garbage of others
    trim_heap()
    return sum(_private_bytes(process) for process in processes_of(engine))


def held_by_device() -> list[int]:
    """Memory that is held now on each GPU that this process sees, by whomever."""
    import torch

    held = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        held.append(total - free)
    return held


def held_by_ranks(engine: InferenceEngine) -> dict[int, int]:
    """Memory that is held now wherever a rank of an engine may be: on each GPU, or in each of its processes."""
    if engine.model_info.device.startswith("cuda"):
        return dict(enumerate(held_by_device()))
    return {process.pid: _private_bytes(process) for process in processes_of(engine)}


async def check_steady(
    measure: Callable[[], Awaitable[Mapping[str, int]]], room: Mapping[str, int], between: str, measurements: int = 6
) -> None:
    """Raise if something that is held grows with the work, for as long as one looks.

    Pools and allocators take large pieces now and then, so one measurement says little, and a series of them may still
    be warming up. The least of the first half is compared with the least of the second. What grew is looked at again:
    a leak goes on, the rest comes to an end.

    Args:
        measure: Does a piece of work, and says what is held after it.
        room: By how much each may grow with a piece of work. Others are not looked at.
        between: The work between two measurements, for the message.
        measurements: In one series. An even number.
    """
    half, message = measurements // 2, ""
    for _ in range(SERIES):
        held = [await measure() for _ in range(measurements)]
        rows = {name: [one[name] for one in held] for name in room}
        grew = {name: (min(row[half:]) - min(row[:half])) // half for name, row in rows.items()}
        name = next((name for name in room if grew[name] > room[name]), None)
        if name is None:
            return
        message = f"{between} took {grew[name]} more {name}, series after series: {rows[name]} in the last"
    raise AssertionError(message)


def parameter_bytes(engine: InferenceEngine) -> int:
    """Size of the model's parameters."""
    import torch

    dtype: torch.dtype = getattr(torch, engine.model_info.dtype)
    return engine.model_info.parameters * dtype.itemsize


def threads_of(engine: InferenceEngine) -> int:
    """Threads of an engine's processes."""
    return sum(_count(process.num_threads) for process in processes_of(engine))


def descriptors_of(engine: InferenceEngine) -> int:
    """Open descriptors of an engine's processes."""
    return sum(_count(process.num_fds) for process in processes_of(engine))


def processes_of(engine: InferenceEngine) -> list[psutil.Process]:
    """The host process and all below it, or this process where the engine runs in it."""
    host = psutil.Process(engine.host_pid)
    return [host, *host.children(recursive=True)]


def _count(number: Callable[[], int]) -> int:
    try:
        return number()
    except psutil.NoSuchProcess:
        return 0


def _private_bytes(process: psutil.Process) -> int:
    """Memory that would be free if the process ended (USS).

    A share of pages that others map too (PSS) grows when one of those others ends.
    """
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0
