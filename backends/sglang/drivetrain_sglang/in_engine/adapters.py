# pyright: reportMissingImports=false
"""Have SGLang load adapters from memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter


def load_held(manager: Any, adapters: Mapping[str, HeldAdapter]) -> None:
    """Have a rank's ``LoRAManager`` load adapters of these paths from memory, and others from their folders."""
    if "load_lora_adapter" in vars(manager):
        return
    from_folder, unload = manager.load_lora_adapter, manager.unload_lora_adapter

    def load(adapter: Any) -> Any:
        held = adapters.get(adapter.lora_path)
        if held is None or not held.tensors:
            return from_folder(adapter)
        loaded = manager.load_lora_adapter_from_tensors(adapter, _staying(held.tensors), held.config)
        if loaded.success and any(tensor.is_cuda for tensor in held.tensors.values()):
            _to_host(manager.loras[adapter.lora_id])
            held.tensors.clear()  # SGLang does not load it a second time
        return loaded

    def unload_held(adapter: Any) -> Any:
        loaded = manager.lora_refs.get(adapter.lora_id)
        if loaded is None or loaded.lora_path not in adapters:
            return unload(adapter)
        # SGLang's own method also logs how much memory is free, for which it empties the GPU's allocator.
        return getattr(manager, "_unload_lora_adapter", unload)(adapter)

    manager.load_lora_adapter, manager.unload_lora_adapter = load, unload_held


class _Staying(torch.Tensor):
    """A tensor on a GPU that SGLang does not copy to the CPU: it would wait for each tensor by itself."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        """Return the tensor itself."""
        return self.as_subclass(torch.Tensor)


def _staying(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.as_subclass(_Staying) if tensor.is_cuda else tensor for name, tensor in tensors.items()}


@torch.no_grad()
def _to_host(adapter: Any) -> None:
    """Move the tensors that SGLang holds for an adapter from the GPU to page-locked memory, in one piece."""
    found = [
        (holder, name, tensor) for holder in _holders(adapter) for name, tensor in holder.items() if tensor.is_cuda
    ]
    by_dtype: dict[torch.dtype, list[tuple[MutableMapping[str, torch.Tensor], str, torch.Tensor]]] = {}
    for one in found:
        by_dtype.setdefault(one[2].dtype, []).append(one)
    for dtype, some in by_dtype.items():
        sizes = [tensor.numel() for _, _, tensor in some]
        together = torch.cat([tensor.reshape(-1) for _, _, tensor in some])
        host = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        torch.cuda.synchronize(together.device)
        for (holder, name, tensor), part in zip(some, torch.split(host, sizes), strict=True):
            holder[name] = part.view(tensor.shape)


def _holders(adapter: Any) -> Iterator[MutableMapping[str, torch.Tensor]]:
    for layer in adapter.layers:
        yield layer.weights
    yield adapter.embedding_layers
    yield adapter.added_tokens_embeddings
