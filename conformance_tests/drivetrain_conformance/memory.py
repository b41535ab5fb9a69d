"""How much memory an engine holds, as the system sees it: what an engine says of itself proves nothing."""

from __future__ import annotations

import gc

import psutil

from drivetrain.engine import InferenceEngine


def held_bytes(engine: InferenceEngine) -> int:
    """Memory that is held now: of the GPUs where the engine is on one, otherwise of the engine's processes."""
    if engine.model_info.device.startswith("cuda"):
        return sum(held_by_device())
    gc.collect()  # an engine in this process is not to blame for the garbage of others
    return sum(_resident_bytes(process) for process in processes_of(engine))


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
    return {process.pid: _resident_bytes(process) for process in processes_of(engine)}


def parameter_bytes(engine: InferenceEngine) -> int:
    """Size of the model's parameters."""
    import torch

    dtype: torch.dtype = getattr(torch, engine.model_info.dtype)
    return engine.model_info.parameters * dtype.itemsize


def processes_of(engine: InferenceEngine) -> list[psutil.Process]:
    """The host process and all below it, or this process where the engine runs in it."""
    host = psutil.Process(engine.host_pid)
    return [host, *host.children(recursive=True)]


def _resident_bytes(process: psutil.Process) -> int:
    """Its share of what is resident: a page that several map counts once, over all of them."""
    try:
        memory = process.memory_full_info()
    except psutil.NoSuchProcess:
        return 0
    return int(getattr(memory, "pss", memory.uss))
