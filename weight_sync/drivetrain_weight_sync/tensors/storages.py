"""Identify the memory of tensors."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while the storage exists, even after its memory was freed."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def place_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for two tensors exactly if they are the same memory, even after it was freed."""
    # An empty storage has no address, but its object keeps its identity.
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
