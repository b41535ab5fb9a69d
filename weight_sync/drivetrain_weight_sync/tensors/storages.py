"""When two tensors are the same memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors over the same memory have in common, also those without memory, as long as one is there."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def place_of(tensor: torch.Tensor) -> Hashable:
    """Return what two tensors have in common when they are the same memory, even if that memory was given back."""
    # An empty storage has no address, but its object keeps its identity.
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
