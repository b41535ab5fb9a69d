"""Vision towers load by the names that transformers saves, and hold the tensors of parts that vLLM does not build."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_vllm.in_engine import vision_names

PART = "vision_model"


class Loader:
    """VLLM's ``AutoWeightsLoader``: loads children by their own ``load_weights``; a name needs a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = set()
        for name, tensor in weights:
            child, _, rest = name.partition(".")
            own: Any = getattr(getattr(self.module, child, None), "load_weights", None)
            if own is not None:
                loaded |= {f"{child}.{one}" for one in own([(rest, tensor)])}
            else:
                self.module.get_parameter(name).data.copy_(tensor)
                loaded.add(name)
        return loaded


class Inner(nn.Module):
    """A tower's only part: one layer of two is built, and no norm after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Linear(2, 2, bias=False)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
        self.post_layernorm = None


def model_of(part: str) -> nn.Module:
    tower, model = type("Tower", (nn.Module,), {})(), nn.Module()
    tower.add_module(part, Inner())
    model.add_module("vision_tower", tower)
    return model


@pytest.fixture(autouse=True)
def loader(monkeypatch: pytest.MonkeyPatch) -> type[Loader]:
    path = "vllm.model_executor.models.utils"
    parents = path.split(".")
    for end in range(1, len(parents) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parents[:end]), ModuleType(".".join(parents[:end])))
    patched = type("AutoWeightsLoader", (Loader,), {"load_weights": Loader.load_weights})
    monkeypatch.setattr(sys.modules[path], "AutoWeightsLoader", patched, raising=False)
    vision_names.register()
    return patched


def named(value: float, inner: str = "") -> dict[str, torch.Tensor]:
    names = ("embeddings.weight", "encoder.layers.0.weight", "encoder.layers.1.weight", "post_layernorm.weight")
    return {f"vision_tower.{inner}{name}": torch.full((2, 2), value) for name in names}


@pytest.mark.parametrize("inner", ["", f"{PART}."])
def test_a_tower_loads_with_and_without_the_name_of_its_part(loader: type[Loader], inner: str) -> None:
    model = model_of(PART)
    loaded = loader(model).load_weights(named(3.0, inner).items())
    assert loaded == {name for name, _ in model.named_parameters()}
    assert {float(value.detach().mean()) for value in model.parameters()} == {3.0}
    assert len([*model.parameters()]) == 4


def test_tensors_of_parts_that_were_not_built_are_held_where_they_were(loader: type[Loader]) -> None:
    model = model_of(PART)
    loader(model).load_weights(named(1.0).items())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    loader(model).load_weights(named(2.0).items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert {float(value.detach().mean()) for value in model.parameters()} == {2.0}


def test_tensors_without_values_are_held_only_if_they_came_before(loader: type[Loader]) -> None:
    model = model_of(PART)
    loader(model).load_weights((name, tensor.to("meta")) for name, tensor in named(1.0).items() if "1" in name)
    assert len([*model.parameters()]) == 2


def test_other_modules_load_as_before(loader: type[Loader]) -> None:
    with pytest.raises(AttributeError):
        loader(model_of("another")).load_weights(named(1.0).items())
