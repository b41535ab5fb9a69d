"""Have SGLang load adapters from memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter


def load_held(manager: Any, adapters: Mapping[str, HeldAdapter]) -> None:
    """Have a rank's ``LoRAManager`` load adapters of these paths from memory, and others from their folders."""
    if "load_lora_adapter" in vars(manager):
        return
    from_folder = manager.load_lora_adapter

    def load(adapter: Any) -> Any:
        held = adapters.get(adapter.lora_path)
        if held is None:
            return from_folder(adapter)
        return manager.load_lora_adapter_from_tensors(adapter, held.tensors, held.config)

    manager.load_lora_adapter = load
