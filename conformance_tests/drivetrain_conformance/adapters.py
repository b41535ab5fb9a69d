"""LoRA adapters that are made on the spot, and models into which they are merged, for the oracle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_TARGETS: Final = ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model, far from doing nothing."""

    path: Path
    """A folder as peft writes it."""
    rank: int
    alpha: int


def make_adapter(model: Path, folder: Path, *, seed: int, rank: int = 4, columns: int | None = None) -> Adapter:
    """Write a random adapter of ``model`` into ``folder``.

    Args:
        model: Folder of the model, whose attention has a ``q_proj`` and a ``v_proj``.
        folder: Where to write.
        seed: Seed of its weights.
        rank: Its rank.
        columns: Width of its inputs, if it shall not fit.
    """
    import torch
    from safetensors.torch import save_file

    adapter = Adapter(folder, rank, alpha=2 * rank)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _targets(model).items():
        rows, inputs = weight.shape
        # Each entry of the product is to be about as large as one of the weight.
        spread = (float(weight.float().std()) / (adapter.alpha / rank) / rank**0.5) ** 0.5
        module = f"base_model.model.{name.removesuffix('.weight')}"
        down = torch.randn(rank, columns or inputs, generator=generator) * spread
        up = torch.randn(rows, rank, generator=generator) * spread
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = down, up
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(_TARGETS),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return adapter


def merge(model: Path, adapter: Adapter, folder: Path) -> Path:
    """Write a copy of ``model`` into ``folder`` whose weights hold the adapter's product, and return it."""
    from safetensors.torch import load_file, save_file

    parts = load_file(adapter.path / "adapter_model.safetensors")
    shutil.copytree(
        model, folder, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copyfile, dirs_exist_ok=True
    )
    os.chmod(folder, 0o755)
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for name, weight in tensors.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in parts:
                product = parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
                tensors[name] = (weight.float() + product * (adapter.alpha / adapter.rank)).to(weight.dtype)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


def _targets(model: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.removesuffix(".weight").rpartition(".")[2] in _TARGETS and name.endswith(".weight"):
                found[name] = tensor
    if not found:
        raise LookupError(f"the model in {model} has no {' and '.join(_TARGETS)} to make an adapter for")
    return found
