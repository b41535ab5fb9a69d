# pyright: reportMissingImports=false
"""SGLang's model code on a CPU with torch's own operators.

SGLang's CPU path proper wants kernels that are in no package; an out-of-tree platform makes every layer take its
plain torch form instead. It is slow, and it is the real engine: scheduler, cache, sampler, weight loading.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A device that SGLang does not know, whose layers are written in torch."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

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
