"""Adapters of a form that SGLang has loaded before are put together at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_sglang.in_engine.adapters import load_held
from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter

LAYERS, RANK, WIDTH = 2, 3, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}
        self.pinned_weights: dict[str, torch.Tensor] = {}


class Adapter(nn.Module):
    """SGLang's ``LoRAAdapter``."""

    loads = 0

    def __init__(self, uid: str, config: object) -> None:
        super().__init__()
        self.uid, self.config = uid, config
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.embedding_layers: dict[str, torch.Tensor] = {}
        self.added_tokens_embeddings: dict[str, torch.Tensor] = {}

    def initialize_weights_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sort the tensors, and join those of q, k and v; absent ones of k are zeros."""
        Adapter.loads += 1
        for name, tensor in tensors.items():
            number, _, own = name.partition(".")
            if number.isdigit():
                held(self)[int(number)][own] = tensor.cpu()
            else:
                self.embedding_layers[name] = tensor.cpu()
        for weights in held(self)[:LAYERS]:
            for part in ("lora_A", "lora_B"):
                if f"q.{part}" in weights:
                    q, v = weights.pop(f"q.{part}"), weights.pop(f"v.{part}")
                    k = weights.pop(f"k.{part}") if f"k.{part}" in weights else torch.zeros_like(v)
                    weights[f"qkv.{part}"] = torch.cat((q, k, v), 0)


class Manager:
    """SGLang's ``LoRAManager``."""

    def __init__(self) -> None:
        self.configs: dict[str, object] = {}
        self.loras: dict[str, Adapter] = {}
        self.lora_refs: dict[str, Any] = {}

    def load_lora_adapter(self, adapter: Any) -> Any:
        raise AssertionError(f"{adapter} from a folder")

    def unload_lora_adapter(self, adapter: Any) -> str:
        self._unload_lora_adapter(adapter)
        return "logged"

    def _unload_lora_adapter(self, adapter: Any) -> str:
        del self.configs[adapter.lora_id], self.loras[adapter.lora_id], self.lora_refs[adapter.lora_id]
        return "unloaded"

    def load_lora_adapter_from_tensors(self, adapter: Any, tensors: dict[str, torch.Tensor], config: object) -> Any:
        self.configs[adapter.lora_id] = SimpleNamespace(fields=config)
        try:
            self.load_lora_weights_from_tensors(adapter, tensors)
        except ValueError as error:
            return SimpleNamespace(success=False, error_message=str(error))
        self.lora_refs[adapter.lora_id] = adapter
        return SimpleNamespace(success=True)

    def load_lora_weights_from_tensors(self, adapter: Any, tensors: dict[str, torch.Tensor]) -> None:
        made = Adapter(adapter.lora_id, self.configs[adapter.lora_id])
        made.initialize_weights_from_tensors(tensors)
        self.loras[adapter.lora_id] = made


def tensors_of(*layers: str, rank: int = RANK) -> dict[str, torch.Tensor]:
    made = {
        f"{number}.{layer}.lora_{part}": torch.randn((rank, WIDTH) if part == "A" else (WIDTH, rank))
        for number in range(LAYERS)
        for layer in layers
        for part in "AB"
    }
    return made | {"embed.lora_A": torch.randn(rank, 20), "embed.lora_B": torch.randn(WIDTH, rank)}


def held(adapter: Any) -> list[dict[str, torch.Tensor]]:
    layers: list[Any] = list(adapter.layers)
    return [*(layer.weights for layer in layers), adapter.embedding_layers, adapter.added_tokens_embeddings]


def push(manager: Manager, adapters: dict[str, HeldAdapter], number: int, tensors: dict[str, torch.Tensor]) -> Adapter:
    """Load an adapter, and check it against SGLang's own."""
    path = f"held-{number}"
    adapters[path] = HeldAdapter({"r": 1}, {name: tensor.clone() for name, tensor in tensors.items()})
    reference = SimpleNamespace(lora_id=str(number), lora_path=path)
    assert manager.load_lora_adapter(reference).success
    made = manager.loras[str(number)]
    assert (made.uid, made.config) == (str(number), manager.configs[str(number)])
    wanted, loads = Adapter("", None), Adapter.loads
    wanted.initialize_weights_from_tensors(tensors)
    Adapter.loads = loads
    for own, other in zip(held(made), held(wanted), strict=True):
        assert list(own) == list(other)
        assert all(torch.equal(own[name], other[name]) for name in own)
    return made


@pytest.mark.parametrize("layers", [("q", "k", "v", "o"), ("q", "v"), ("o",)])
def test_later_pushes_of_a_form_are_put_together_without_sglangs_loader(layers: tuple[str, ...]) -> None:
    manager, adapters, made = Manager(), dict[str, HeldAdapter](), list[Adapter]()
    load_held(manager, adapters)
    push(manager, adapters, 0, tensors_of(*layers))
    loads = Adapter.loads
    made = [push(manager, adapters, number, tensors_of(*layers)) for number in range(1, 4)]
    assert Adapter.loads == loads
    first, second, _ = made
    assert first.layers[0].pinned_weights is not second.layers[0].pinned_weights
    other = tensors_of(*layers, rank=RANK + 1)
    push(manager, adapters, 9, other)
    assert Adapter.loads > loads, "another rank is another form"
    wrong = manager.unload_lora_adapter(SimpleNamespace(lora_id="9"))
    assert wrong == "unloaded", "an adapter of a path is unloaded without the log"


def test_weights_that_are_computed_are_always_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Adapter.initialize_weights_from_tensors

    def doubled(adapter: Adapter, tensors: dict[str, torch.Tensor]) -> None:
        own(adapter, {name: tensor * 2 for name, tensor in tensors.items()})

    monkeypatch.setattr(Adapter, "initialize_weights_from_tensors", doubled)
    manager, adapters = Manager(), dict[str, HeldAdapter]()
    load_held(manager, adapters)
    for number in range(3):
        loads = Adapter.loads
        push(manager, adapters, number, tensors_of("q", "k", "v"))
        assert Adapter.loads > loads
