"""Have SGLang load adapters from memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain_sglang.in_engine.adapters_again import LoadsAgain
from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter


def load_held(manager: Any, adapters: Mapping[str, HeldAdapter]) -> None:
    """Have a rank's ``LoRAManager`` load adapters of these paths from memory, and others from their folders."""
    if "load_lora_adapter" in vars(manager):
        return
    from_folder, unload, again = manager.load_lora_adapter, manager.unload_lora_adapter, LoadsAgain(manager)

    def load(adapter: Any) -> Any:
        held = adapters.get(adapter.lora_path)
        if held is None or not held.tensors:
            return from_folder(adapter)
        loaded = again.load(adapter, held)
        if loaded.success and any(tensor.is_cuda for tensor in held.tensors.values()):
            held.tensors.clear()  # SGLang holds them on the host, and does not load them a second time
        return loaded

    def unload_held(adapter: Any) -> Any:
        loaded = manager.lora_refs.get(adapter.lora_id)
        if loaded is None or loaded.lora_path not in adapters:
            return unload(adapter)
        # SGLang's own method also logs how much memory is free, for which it empties the GPU's allocator.
        return getattr(manager, "_unload_lora_adapter", unload)(adapter)

    manager.load_lora_adapter, manager.unload_lora_adapter = load, unload_held
