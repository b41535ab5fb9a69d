# pyright: reportMissingImports=false
"""Entry points of the platform: active on machines without a GPU. Import nothing of SGLang before they are called."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any


def activate() -> str | None:
    """Name the platform's class, or None where there is a GPU to run on."""
    import torch

    return None if torch.cuda.is_available() else "sglang_torch_cpu_platform.TorchCpuPlatform"


def mend() -> None:
    """Let SGLang's LoRA modules do without pinned memory, which only a GPU's driver has to give, and start sooner."""
    import torch

    if torch.cuda.is_available():
        return
    _fork_schedulers()
    torch.compiler.set_stance("force_eager")  # for a model that is split: twenty seconds of compiling
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    unpinned = _WithoutPins()
    for module in (layers, torch_backend):
        vars(module)["torch"] = unpinned
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def _fork_schedulers() -> None:
    """Start schedulers by a fork, which CUDA would not bear: they need not import SGLang again, which takes 20 s."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)


def _fork(_: object, arguments: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)
    # SGLang has a rank for each NUMA node, unless it is told which cores each takes.
    ranks = arguments.tp_size * arguments.pp_size * arguments.dp_size
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[i % len(cores)]) for i in range(ranks)))


class _WithoutPins:
    """torch, whose factories pass over ``pin_memory``. Only for the modules above: elsewhere nothing is changed."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return found

        def make(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return found(*arguments, **named)

        return make
