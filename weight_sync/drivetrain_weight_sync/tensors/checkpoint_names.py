"""Derive a tensor's checkpoint name from its name in a wrapped module."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Final

_ANYWHERE: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

_NAMES_KEPT: Final = 1 << 16


@lru_cache(_NAMES_KEPT)
def unwrapped(name: str) -> str:
    """Drop prefixes of wrappers: ``_orig_mod.`` (torch.compile), FSDP's, checkpointing's, and leading ``module.``.

    ``module._orig_mod.model.norm.weight`` becomes ``model.norm.weight``.
    """
    parts = name.split(".")
    kept = ".".join(part for part in parts if f"{part}." not in _ANYWHERE)
    while kept.startswith("module."):
        kept = kept.removeprefix("module.")
    return kept


@lru_cache(_NAMES_KEPT)
def base_name(name: str) -> str | None:
    """Return the checkpoint name of a tensor of a peft-wrapped module; None for the adapter's own tensors.

    ``base_model.model.model.layers.0.mlp.up_proj.base_layer.weight`` becomes ``model.layers.0.mlp.up_proj.weight``.
    """
    parts = unwrapped(name).split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(part for part in parts if part != "base_layer")


def listed(names: Collection[str], most: int = 8) -> str:
    """Return ``"a, b, c and 5 more"``, for messages."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
