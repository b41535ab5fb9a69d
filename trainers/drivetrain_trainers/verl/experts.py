"""Stack experts again that verl has split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

import torch

_SPLIT: Final = re.compile(r"(?P<experts>.+\.mlp\.experts)\.\d+\.(?P<part>gate|up|down)_proj\.weight")
_STACKS: Final = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


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
            parts.append(tensor)
        else:
            yield name, tensor
    if stack:
        yield stack, _joined(stack, parts)


def _joined(stack: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return shape ``[experts, rows, columns]``; rows of a gate and its up projection follow each other."""
    whole = torch.stack(parts)
    return whole.view(len(parts) // 2, -1, whole.shape[-1]) if stack.endswith("gate_up_proj") else whole
