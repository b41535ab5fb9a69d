# pyright: reportMissingImports=false
"""SGLang platform that runs the models on a CPU with torch's own operators.

SGLang's regular CPU path needs kernels that no package contains. An out-of-tree platform makes every layer use its
plain torch form instead. It is slow, but the engine is real: scheduler, cache, sampler, weight loading.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

try:
    from sglang.srt.platforms.interface import PlatformCapabilities
except ImportError:  # older releases, such as 0.5.20
    PlatformCapabilities = None
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none")  # otherwise two ranks would connect through NCCL


def _cache(_: object) -> Any:
    """Return the class of the KV cache."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def _cache_allocator(_: object) -> Any:
    """Return a factory of the KV cache's page allocator, also for pages of one token."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    def allocator(size: int, page_size: int, **fields: Any) -> Any:
        if page_size == 1:
            return TokenToKVPoolAllocator(size, **fields)
        return PagedTokenToKVPoolAllocator(size, page_size=page_size, **fields)

    return allocator


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree device whose layers run in plain torch."""

    _enum = PlatformEnum.OOT
    if PlatformCapabilities:
        capabilities = PlatformCapabilities()
    else:  # older releases ask the platform for its cache classes
        get_mha_kv_pool_cls = _cache
        get_paged_allocator_cls = _cache_allocator

    def get_default_attention_backend(self) -> str:
        """Select attention by ``torch.nn.functional``."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Select the plain torch form of layers."""
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Return False: there is no device to copy to."""
        return False

    def empty_cache(self) -> None:
        """Do nothing: SGLang would collect garbage at each flush, for a tenth of a second, and free nothing."""

    def get_torch_profiler_activity_str(self) -> str:
        """Return the activity that SGLang's profiler records."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return the same activity as torch's enum."""
        return torch.profiler.ProfilerActivity.CPU
