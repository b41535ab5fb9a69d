"""Checkpoint names for a peft model whose adapters are merged in place."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.tensors.names import base_name, listed

Pairs = Sequence[tuple[str, torch.Tensor]]


def without_adapters(module: nn.Module, pairs: Pairs) -> Pairs:
    """Return the base weights of ``module``, into which ``merge_adapter()`` has merged its active adapters.

    Args:
        module: The trainer's module, wrapped by peft or not.
        pairs: The tensors of its state dict.

    Raises:
        WeightSyncError: an adapter is not merged.
    """
    if "peft" not in sys.modules:
        return pairs
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers = {name: part for name, part in module.named_modules() if isinstance(part, BaseTunerLayer)}
    saved = {name: part for name, part in module.named_modules() if isinstance(part, ModulesToSaveWrapper)}
    if not layers and not saved:
        return pairs
    apart = [name for name, part in layers.items() if not _is_merged(part)]
    if apart:
        raise WeightSyncError(
            f"adapters of {listed(apart, 3)} are not merged into the weights; nothing was changed. Call "
            "merge_adapter() before the push and unmerge_adapter() after it, or push the adapter alone with LoraSync"
        )
    added = {name for part in layers.values() for name in (*part.adapter_layer_names, *part.other_param_names)}
    kept: list[tuple[str, torch.Tensor]] = []
    for name, tensor in pairs:
        parts = name.split(".")
        if "original_module" in parts or not added.isdisjoint(parts):
            continue
        if "modules_to_save" in parts:
            place = parts.index("modules_to_save")
            if parts[place + 1] not in _active(saved[".".join(parts[:place])]):
                continue
            del parts[place : place + 2]
        own = base_name(".".join(parts))
        if own is not None:
            kept.append((own, tensor))
    return kept


def _is_merged(layer: object) -> bool:
    """Return whether all active adapters of the layer, and no others, are merged into its base weights."""
    merged: list[str] = getattr(layer, "merged_adapters", [])
    return set(_active(layer)) == set(merged)


def _active(part: object) -> list[str]:
    active: str | list[str] = getattr(part, "active_adapters", None) or getattr(part, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)
