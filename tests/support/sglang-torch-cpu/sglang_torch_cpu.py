# pyright: reportMissingImports=false
"""Entry points of the platform, active on machines without a GPU. They import SGLang only when called."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any


def activate() -> str | None:
    """Return the platform class's name; None if there is a GPU."""
    import torch

    return None if torch.cuda.is_available() else "sglang_torch_cpu_platform.TorchCpuPlatform"


def mend() -> None:
    """Make SGLang's LoRA modules work without pinned memory, which needs a GPU driver, and speed up the start."""
    import torch

    if torch.cuda.is_available():
        return
    _fork_schedulers()
    torch.compiler.set_stance("force_eager")  # saves twenty seconds of compiling a model split over ranks
    import sglang_torch_cpu_fp8
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    sglang_torch_cpu_fp8.use()
    unpinned = _WithoutPins()
    for module in (layers, torch_backend):
        vars(module)["torch"] = unpinned
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def _fork_schedulers() -> None:
    """Fork the schedulers, which saves importing SGLang again (20 s); impossible with CUDA."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)


def _fork(_: object, arguments: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)
    # SGLang starts one rank per NUMA node, unless each rank's cores are given.
    ranks = arguments.tp_size * arguments.pp_size * arguments.dp_size
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[i % len(cores)]) for i in range(ranks)))


class _WithoutPins:
    """Proxy of torch whose factories ignore ``pin_memory``; used only by the modules above."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return found

        def make(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return found(*arguments, **named)

        return make
