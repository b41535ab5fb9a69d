"""The tensors of a transformers model as its checkpoint names and divides them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def by_checkpoint_name(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``tensors`` of ``module`` as its checkpoint holds them, in their order: views, never copies.

    Transformers stacks what a checkpoint holds apart: ``mlp.experts.gate_up_proj`` of a layer is the
    ``mlp.experts.3.up_proj.weight`` of each of its experts. Other modules, and models whose checkpoint cannot be had
    as views that cover every element, keep their own names.

    Args:
        module: the model, or what it is wrapped in.
        tensors: its parameters and persistent buffers, by name, without wrappers' prefixes.
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
    """Leaves pieces of a tensor where they lie, though transformers asks for contiguous ones."""

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
