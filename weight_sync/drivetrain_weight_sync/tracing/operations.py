"""What a ``TorchDispatchMode`` asks of an operation and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def tensors_in(*values: object) -> list[torch.Tensor]:
    """The tensors among an operation's arguments, or its results; torch's trees took a third of a recording."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Those of the arguments that the operation writes to, ``out`` among them."""
    return [
        args[index] if index < len(args) else (kwargs or {}).get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
