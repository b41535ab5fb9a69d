# pyright: reportMissingImports=false
"""Lets verl train on a CPU with gloo, for tests. Set VERL_PLATFORM=cpu, and VERL_ENGINE_DEVICE=cuda.

verl registers its FSDP engine for accelerators alone, so that the second variable lends it theirs. Ray counts GPUs on
paper: ``ray_kwargs.ray_init.num_gpus``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: object, **__: object) -> None:
    """Stand for what only an accelerator does."""


def _device_module() -> ModuleType:
    module = ModuleType("verl_cpu.device")
    for name in ("empty_cache", "synchronize", "set_device", "ipc_collect", "set_per_process_memory_fraction"):
        setattr(module, name, _nothing)
    for name in ("memory_reserved", "memory_allocated", "max_memory_reserved", "max_memory_allocated"):
        setattr(module, name, lambda *_: 0)
    for name in ("Stream", "Event", "stream", "current_stream"):
        setattr(module, name, getattr(torch.cpu, name, _nothing))
    facts: dict[str, object] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "get_device_properties": lambda *_: SimpleNamespace(name="cpu", total_memory=1 << 30),
    }
    for name, fact in facts.items():
        setattr(module, name, fact)
    return module


_module = _device_module()
_init_process_group = torch.distributed.init_process_group


def _init_with_gloo_once(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Take the name that verl makes of the CPU's backend and the accelerator's, which are one here."""
    _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_with_gloo_once


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A CPU in the place of an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # only where VERL_PLATFORM names it

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl moves tensors to it

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = manual_seed_all = _nothing
    profiler_start = profiler_stop = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
