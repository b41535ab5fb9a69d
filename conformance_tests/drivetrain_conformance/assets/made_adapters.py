"""Create random LoRA adapters, and models with an adapter merged into them for the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from drivetrain_conformance.assets.served_models import copy_model
from drivetrain_weight_sync import AdapterTensors

_TARGETS: Final = ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that changes a model's answers noticeably."""

    path: Path
    """The adapter's folder, in peft's format."""
    scales: Mapping[str, float]
    """Scale of each adapted layer's ``B @ A``, by the layer's name."""


def make_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    columns: int | None = None,
    targets: Sequence[str] = _TARGETS,
    settings: Mapping[str, object] | None = None,
) -> Adapter:
    """Write a random adapter of ``model`` into ``folder``.

    Args:
        model: Folder of the model, whose attention has a ``q_proj`` and a ``v_proj``.
        folder: The folder to write.
        seed: Seed of the adapter's weights.
        rank: The adapter's rank.
        columns: Width of its inputs, to make an adapter that does not fit.
        targets: The adapted layers, by the last part of their names.
        settings: Fields of ``adapter_config.json``; ``lora_alpha``, ``use_rslora``, ``rank_pattern``, ``alpha_pattern``
            and ``layers_to_transform`` affect the weights and scales.
    """
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **(settings or {}),
    }
    alpha_of_all = float(str(config["lora_alpha"]))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {}
    for name, weight in _targets(model, targets).items():
        layer = name.removesuffix(".weight")
        if not _is_transformed(layer, config):
            continue
        rows, inputs = weight.shape
        own = int(_setting(config, "rank_pattern", layer, rank))
        alpha = _setting(config, "alpha_pattern", layer, alpha_of_all)
        scales[layer] = alpha / (own**0.5 if config.get("use_rslora") else own)
        # Make each entry of the product about as large as an entry of the weight.
        spread = (float(weight.float().std()) / scales[layer] / own**0.5) ** 0.5
        module = f"base_model.model.{layer}"
        # An embedding's product is transposed.
        a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding(layer) else ("lora_A.weight", "lora_B.weight")
        rows, inputs = (inputs, rows) if is_embedding(layer) else (rows, inputs)
        tensors[f"{module}.{a}"] = torch.randn(own, columns or inputs, generator=generator) * spread
        tensors[f"{module}.{b}"] = torch.randn(rows, own, generator=generator) * spread
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Adapter(folder, scales)


def change_adapter(
    adapter: Adapter, folder: Path, change: Callable[[dict[str, object], dict[str, torch.Tensor]], object]
) -> Path:
    """Write a copy of an adapter into ``folder`` with its configuration and tensors changed; return the folder."""
    config = json.loads((adapter.path / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter.path / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def tensors_in(folder: Path) -> AdapterTensors:
    """Return the adapter of a peft folder as a trainer without peft holds it."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return AdapterTensors(config, load_file(folder / "adapter_model.safetensors"))


def has_layers(model: Path, targets: Sequence[str]) -> bool:
    """Return True if the model has layers of all these names."""
    found = {name.removesuffix(".weight").rpartition(".")[2] for name in _targets(model, targets)}
    return found == set(targets)


def is_embedding(layer: str) -> bool:
    """Return True if a layer is the model's embedding of tokens."""
    return layer.rpartition(".")[2] == "embed_tokens"


def _setting(config: Mapping[str, object], field: str, layer: str, otherwise: float) -> float:
    """Return the value of the pattern's first key that ends the layer's name."""
    pattern = config.get(field)
    matching = [value for key, value in (pattern if isinstance(pattern, dict) else {}).items() if layer.endswith(key)]
    return float(matching[0]) if matching else otherwise


def _is_transformed(layer: str, config: Mapping[str, object]) -> bool:
    layers = config.get("layers_to_transform")
    return not isinstance(layers, list) or any(part.isdigit() and int(part) in layers for part in layer.split("."))


def merge(model: Path, adapter: Adapter, folder: Path) -> Path:
    """Write a copy of ``model`` into ``folder`` with the adapter merged into its weights; return the folder."""
    parts = load_file(adapter.path / "adapter_model.safetensors")
    copy_model(model, folder, without="*.safetensors")
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for name, weight in tensors.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_embedding_A" in parts:
                product = (parts[f"{module}.lora_embedding_B"] @ parts[f"{module}.lora_embedding_A"]).T
            elif f"{module}.lora_A.weight" in parts:
                product = parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
            else:
                continue
            scale = adapter.scales[name.removesuffix(".weight")]
            tensors[name] = (weight.float() + product * scale).to(weight.dtype)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


def _targets(model: Path, targets: Sequence[str] = _TARGETS) -> Mapping[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.removesuffix(".weight").rpartition(".")[2] in targets and name.endswith(".weight"):
                found[name] = tensor
    if not found and targets is _TARGETS:
        raise LookupError(f"the model in {model} has no {' and '.join(_TARGETS)} to make an adapter for")
    return found
