"""Keep the objects that hold an engine's tensors in place when the engine makes them anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


@torch.no_grad()
def put_back(owner: object, before: Mapping[str, object]) -> None:
    """Restore attributes whose objects were made anew, such as kernels, with the new objects' values.

    CUDA graphs read memory at the addresses of the tensors that the old objects hold.

    Args:
        owner: An object with a ``__dict__``.
        before: Its attributes before they were made anew.
    """
    for name, old in before.items():
        new = getattr(owner, name, old)
        if new is not old and type(new) is type(old) and not isinstance(old, bool | int | float | str):
            _take_values(old, new, set())
            setattr(owner, name, old)


def _take_values(old: object, new: object, seen: set[int]) -> None:
    """Copy the tensors and numbers that an object reaches to the same places of its predecessor."""
    if old is new or id(old) in seen or type(old) is not type(new) or isinstance(old, nn.Module):
        return
    seen.add(id(old))
    if isinstance(old, torch.Tensor):
        assert isinstance(new, torch.Tensor)
        if (old.dtype, old.shape) == (new.dtype, new.shape):
            old.copy_(new)
    elif isinstance(old, dict):
        assert isinstance(new, dict)
        for key in old.keys() & new.keys():
            if isinstance(new[key], bool | int | float):
                old[key] = new[key]
            else:
                _take_values(old[key], new[key], seen)
    elif isinstance(old, list | tuple):
        assert isinstance(new, Sequence)
        for one, other in zip(old, new, strict=False):
            _take_values(one, other, seen)
    elif hasattr(old, "__dict__"):
        _take_values(vars(old), vars(new), seen)
