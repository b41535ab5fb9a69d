"""Rename and split a transformers model's tensors as in its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_TWICE: Final = ("language_model.model.model.", "language_model.model.")
"""Part of the names that transformers 5.19 gives Qwen2-Audio's tensors, and that of the checkpoint: it reverts one
renaming twice."""


def by_checkpoint_name(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``module`` named and split as in its checkpoint, in their order: views, never copies.

    Transformers stacks tensors that a checkpoint holds separately: a layer's ``mlp.experts.gate_up_proj`` holds
    ``mlp.experts.3.up_proj.weight`` and its like of all experts. Tensors keep their own names in other modules, and in
    models whose checkpoint cannot be expressed as views that cover every element.

    Args:
        module: the model, possibly wrapped.
        tensors: its parameters and persistent buffers by name, without wrappers' prefixes.
    """
    own = dict(tensors)
    if "transformers" not in sys.modules or any(hasattr(tensor, "full_tensor") for tensor in own.values()):
        return own
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5 it names tensors in memory as checkpoints do
        return own

    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        return own
    with torch.no_grad(), _WithoutCopies():
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(own))
    found = {name.replace(*_TWICE): tensor for name, tensor in found.items()}
    place = {name: index for index, name in enumerate(own)}
    place_of_stack = {_storage(tensor): place[name] for name, tensor in own.items()}
    whole = sum(tensor.numel() for tensor in found.values()) == sum(tensor.numel() for tensor in own.values())
    if not whole or any(_storage(tensor) not in place_of_stack for tensor in found.values()):
        return own
    return dict(sorted(found.items(), key=lambda item: place.get(item[0], place_of_stack[_storage(item[1])])))


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


class _WithoutCopies(TorchFunctionMode):
    """Keeps slices of tensors as views where transformers calls ``contiguous()``."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))
