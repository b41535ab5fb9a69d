"""Inspect an operation and its tensors, for a ``TorchDispatchMode``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def tensors_in(*values: object) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results; torch's own pytrees take a third of a trace's time."""
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
    """Return the arguments that the operation writes to, including ``out``."""
    return [
        args[index] if index < len(args) else (kwargs or {}).get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
