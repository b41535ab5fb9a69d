"""Measure an engine's memory as the operating system and the driver see it, not as the engine reports it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

import psutil
import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain_conformance.harness.testbench import until_idle
from drivetrain_weight_sync.receiver.cpu_sleep import trim_heap

SERIES: Final = 6
"""Maximum series of measurements; growth that none of them ends is a leak."""
COUNTED: Final[Mapping[str, float]] = dict.fromkeys(
    ("threads", "descriptors", "mappings of files", "tasks", "timers"), 0.5
)
"""Allowed growth of counts: a pool adds a thread now and then, a leak adds one with every piece of work."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_GPU_PROCESS: Final = re.compile(r"process\s+(\d+) uses\s+([\d.]+) MB")
"""A line of ``torch.cuda.list_gpu_processes``."""


def held_bytes(engine: InferenceEngine) -> int:
    """Return the memory held now: on the GPUs if the engine uses one, otherwise by the engine's processes."""
    if engine.model_info.device.startswith("cuda"):
        return sum(held_by_device())
    _drop_garbage()  # garbage of others in this process must not count against the engine
    return sum(_private_bytes(process) for process in processes_of(engine))


def held_by_this_process() -> int:
    """Return the memory held now by this process, and by it and its descendants on the GPUs."""
    _drop_garbage()
    return _private_bytes(psutil.Process()) + sum(held_by_device())


def _drop_garbage() -> None:
    _return_freed_memory_at_once()
    gc.collect()
    trim_heap()


@cache
def _return_freed_memory_at_once() -> None:
    """Let the C library of this process, where an inline engine runs, give freed memory back without a reserve.

    ``malloc_trim`` returns the free end of the main thread's arena, but not that of another thread's. After a block of
    32 MiB was freed, up to 64 MiB stay there: too much to tell what an engine's thread has freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_TRIM_THRESHOLD, 0)
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # malloc would adapt it up to this, but not once the other one is set


def held_by_device() -> list[int]:
    """Return the memory in use on each GPU that this process sees, by this process and its descendants.

    Where the driver does not tell processes apart, such as in a container, memory of other processes is included.
    """
    mine = {child.pid for child in psutil.Process().children(recursive=True)} | {os.getpid()}
    held = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        by_process = _held_by_process(index)
        # The line above has put this process onto the GPU: if it is not listed, the driver's pids are others.
        told = os.getpid() in by_process
        held.append(sum(size for pid, size in by_process.items() if pid in mine) if told else total - free)
    return held


def tells_processes_apart() -> bool:
    """Return True if the driver of each GPU says how much memory this process holds there."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.mem_get_info(index)
        if os.getpid() not in _held_by_process(index):
            return False
    return True


def _held_by_process(index: int) -> dict[int, int]:
    """Return the bytes that each process holds on a GPU; empty if the driver, or a lack of pynvml, hides them."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return {}
    try:
        listed = torch.cuda.list_gpu_processes(index)
    except (nvml.NVMLError, TypeError):  # TypeError: the driver lists processes without their memory
        return {}
    return {int(pid): round(float(held) * 2**20) for pid, held in _GPU_PROCESS.findall(listed)}


def held_by_ranks(engine: InferenceEngine) -> dict[int, int]:
    """Return the memory held now at each place where a rank may live: per GPU, or per process of the engine."""
    if engine.model_info.device.startswith("cuda"):
        return dict(enumerate(held_by_device()))
    return {process.pid: _private_bytes(process) for process in processes_of(engine)}


async def check_steady(
    measure: Callable[[], Awaitable[Mapping[str, int]]], room: Mapping[str, float], between: str, measurements: int = 6
) -> None:
    """Raise if held memory grows steadily with the work.

    One measurement proves nothing: allocators occasionally take or return a large block, and caches warm up. If
    something grew, another series continues the last one: a leak keeps growing, a cache does not.

    Args:
        measure: Does a piece of work, and returns the resources held after it, by name.
        room: Allowed growth per piece of work, by name. Other names are ignored.
        between: The work between two measurements, for the message.
        measurements: Number in one series; at least 6. The last two series are looked at together.
    """
    held: list[Mapping[str, int]] = []
    message = ""
    for _ in range(SERIES):
        held += [await measure() for _ in range(measurements)]
        rows = {name: [one[name] for one in held[-2 * measurements :]] for name in room}
        grew = {name: steady_growth(rows[name], allowed) for name, allowed in room.items()}
        leaks = [f"{grew[name]:.0f} more {name} ({rows[name]})" for name in room if grew[name] > room[name]]
        if not leaks:
            return
        message = f"{between} took, series after series, {', '.join(leaks)}; in brackets, the last measurements"
    raise AssertionError(message)


def steady_growth(held: Sequence[int], room: float) -> float:
    """Return the growth between two measurements, without the largest rises and falls.

    Memory that is given back at once, such as by a garbage collection, hides a leak from any comparison of earlier with
    later measurements. So each fall by more than ``room`` is left out, and as many of the largest rises: blocks that
    were taken and returned cancel out. At least a sixth of the changes is left out at either end. Where more than a
    third of the changes are falls, the amount goes up and down, and no change is left out.

    Args:
        held: Amount held after each piece of work; at least 6 measurements.
        room: Falls by more than this are no noise.
    """
    changes = sorted(after - before for before, after in pairwise(held))
    falls = sum(change < -room for change in changes)
    if 3 * falls > len(changes):
        return fmean(changes)
    left_out = min(max(falls, 1, len(changes) // 6), (len(changes) - 1) // 2)
    return fmean(changes[left_out : len(changes) - left_out])


async def held_by(engine: InferenceEngine) -> dict[str, int]:
    """Measure an idle engine's memory, threads, descriptors and mappings, and this event loop's tasks and timers."""
    await until_idle(engine)
    cached = (await engine.stats()).kv_cache_bytes
    return {"bytes of memory": held_bytes(engine), "bytes of KV cache": cached, **counted_of(engine)}


def counted_of(engine: InferenceEngine) -> dict[str, int]:
    """Count an engine's threads, descriptors and mappings, and this event loop's tasks and timers."""
    processes = processes_of(engine)
    return {
        "threads": sum(_count(process.num_threads) for process in processes),
        "descriptors": sum(_count(process.num_fds) for process in processes),
        "mappings of files": mappings_of(engine, " /"),
        "tasks": len(asyncio.all_tasks()),
        "timers": _timers(),
    }


def _timers() -> int:
    """Return how many calls the event loop will make later; each holds its arguments. 0 if the loop hides them."""
    scheduled: Sequence[asyncio.TimerHandle] = getattr(asyncio.get_running_loop(), "_scheduled", ())
    return sum(not timer.cancelled() for timer in scheduled)


def parameter_bytes(engine: InferenceEngine) -> int:
    """Return the size of the model's parameters."""
    dtype: torch.dtype = getattr(torch, engine.model_info.dtype)
    return engine.model_info.parameters * dtype.itemsize


def mappings_of(engine: InferenceEngine, name: str) -> int:
    """Return how many mappings of files of this name an engine's processes hold; 0 where the system does not say.

    A mapped file that was not written to takes no memory of its own, but the number of mappings is limited.
    """
    return sum(_lines_with(process.pid, name) for process in processes_of(engine))


def processes_of(engine: InferenceEngine) -> list[psutil.Process]:
    """Return the host process and its descendants, or this process if the engine runs in it."""
    host = psutil.Process(engine.host_pid)
    return [host, *host.children(recursive=True)]


def _count(number: Callable[[], int]) -> int:
    try:
        return number()
    except psutil.NoSuchProcess:
        return 0


def _lines_with(pid: int, name: str) -> int:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace").count(name)
    except OSError:
        return 0


def _private_bytes(process: psutil.Process) -> int:
    """Return a process's private memory, without pages that the kernel may drop at any time.

    Unlike the USS, it leaves out unmodified pages of files: the kernel takes those back when it likes, which would look
    like memory that the engine gave back.
    """
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(1024 * int(fields.get(name, "0").split()[0]) for name in ("Private_Dirty", "Swap"))
