"""LoRA adapters."""

from __future__ import annotations

import os

from drivetrain.engine.api.page import Page
from drivetrain.types.arguments import checked


class LoraCalls(Page):
    """Load and unload adapters; requests name one by ``lora=``."""

    @checked
    async def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, pinned: bool = False
    ) -> None:
        """Load an adapter from a peft folder; ``pinned`` keeps it from being evicted.

        Raises:
            TooManyAdapters: ``max_loras`` adapters are loaded.
            InvalidRequest: the name is taken, ``max_lora_rank`` is exceeded, or the folder holds no adapter of this
                model.
        """
        await self.parts.adapters.load(lora_name, os.fspath(lora_path), pinned)

    @checked
    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter; requests that use it afterwards are refused.

        Raises:
            InvalidRequest: it is not loaded.
            EngineBusy: requests that use it are under way.
            DeadlineExceeded: it took longer than ``timeouts.control``. The adapter is not served any more, and its name
                is free; the next load waits until the engine has unloaded it.
        """
        await self.parts.adapters.unload(lora_name)
