"""Stack experts again that verl has split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

import torch

from drivetrain.errors import WeightPlanMismatch

_SPLIT: Final = re.compile(r"(?P<experts>.+\.mlp\.experts)\.\d+\.(?P<part>gate|up|down)_proj\.weight")
_STACKS: Final = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The tensors of each expert that verl makes of a stack, in their order."""


def restacked(
    weights: Iterator[tuple[str, torch.Tensor]], known: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights under the engine's names, or under those that the transformers model has in memory.

    verl splits a stack such as ``mlp.experts.gate_up_proj`` into tensors like ``mlp.experts.3.up_proj.weight``, which
    Mixtral's checkpoint calls ``block_sparse_moe.experts.3.w3.weight``. Weight sync translates the name of the stack
    alone. Source: ``unfuse_moe_params`` of verl 0.9.1, ``workers/engine/fsdp/utils.py:90``.

    Args:
        weights: Named tensors; those of one stack follow each other, the experts in order.
        known: Names of the engine's tensors, with their aliases. Split tensors of these names stay as they are.

    Raises:
        WeightPlanMismatch: The experts of a stack arrive in another order, or the last one's up projection is missing.
    """
    stack, parts = "", list[torch.Tensor]()
    for name, tensor in weights:
        split = None if name in known else _SPLIT.fullmatch(name)
        joined = "" if split is None else f"{split['experts']}.{_STACKS[split['part']]}"
        if stack and joined != stack:
            yield stack, _joined(stack, parts)
            parts = []
        stack = joined
        if stack:
            if name != _next(stack, parts):
                raise WeightPlanMismatch(
                    f"{name} arrived where {_next(stack, parts)} was expected; verl sends the experts of a stack in "
                    "order, one stack after the other",
                    mismatched=[name],
                )
            parts.append(tensor)
        else:
            yield name, tensor
    if stack:
        yield stack, _joined(stack, parts)


def _next(stack: str, parts: list[torch.Tensor]) -> str:
    """Return the name of the tensor that follows the first ``parts`` of a stack."""
    experts, _, name = stack.rpartition(".")
    expert, part = divmod(len(parts), len(_PARTS[name]))
    return f"{experts}.{expert}.{_PARTS[name][part]}.weight"


def _joined(stack: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return shape ``[experts, rows, columns]``; rows of a gate and its up projection follow each other."""
    if not stack.endswith("gate_up_proj"):
        return torch.stack(parts)
    if len(parts) % 2:
        missing = _next(stack, parts)
        raise WeightPlanMismatch(f"{missing} is missing: an expert has a gate and an up projection", missing=[missing])
    whole = torch.stack(parts)
    return whole.view(len(parts) // 2, -1, whole.shape[-1])
