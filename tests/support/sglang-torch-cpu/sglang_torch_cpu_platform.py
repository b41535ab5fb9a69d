# pyright: reportMissingImports=false
"""SGLang's model code on a CPU with torch's own operators.

SGLang's CPU path proper wants kernels that are in no package; an out-of-tree platform makes every layer take its
plain torch form instead. It is slow, and it is the real engine: scheduler, cache, sampler, weight loading.
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
except ImportError:  # older releases, seen in 0.5.20
    PlatformCapabilities = None
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none")  # or two ranks would meet through NCCL, found or not


def _cache(_: object) -> Any:
    """The cache's keys and values."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def _cache_allocator(_: object) -> Any:
    """What gives out the cache's pages, of one token each if need be."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    def allocator(size: int, page_size: int, **fields: Any) -> Any:
        if page_size == 1:
            return TokenToKVPoolAllocator(size, **fields)
        return PagedTokenToKVPoolAllocator(size, page_size=page_size, **fields)

    return allocator


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A device that SGLang does not know, whose layers are written in torch."""

    _enum = PlatformEnum.OOT
    if PlatformCapabilities:
        capabilities = PlatformCapabilities()
    else:  # then SGLang asks the platform for its caches' classes
        get_mha_kv_pool_cls = _cache
        get_paged_allocator_cls = _cache_allocator

    def get_default_attention_backend(self) -> str:
        """Attention by ``torch.nn.functional``."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Layers take their plain torch form."""
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """There is no device to copy to."""
        return False

    def empty_cache(self) -> None:
        """SGLang would collect garbage at each flush, a tenth of a second each time, and give nothing back."""

    def get_torch_profiler_activity_str(self) -> str:
        """What SGLang's profiler records."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The same, as torch names it."""
        return torch.profiler.ProfilerActivity.CPU
