"""A torch module as the target of weights."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tests.weight_sync.models import Model, tensors_of
from torch import nn

from drivetrain.errors import EngineStateError, WeightTransferFailed
from drivetrain.types.weights import TensorSpec
from drivetrain_weight_sync import ModuleTarget


def test_the_manifest_names_parameters_and_persistent_buffers_once() -> None:
    model = Model(0)
    manifest = ModuleTarget(model).manifest()
    expected = tensors_of(model)
    del expected["lm_head.weight"]
    assert {spec.name for spec in manifest.tensors} == expected.keys()
    assert TensorSpec("model.layers.1.scale", "float32", ()) in manifest.tensors
    assert TensorSpec("model.layers.0.up.weight", "bfloat16", (72, 24)) in manifest.tensors
    assert manifest.aliases == {"lm_head.weight": "model.embed.weight"}
    assert not any(spec.name.endswith("cache") for spec in manifest.tensors)


def test_parameters_that_share_memory_are_tied_even_if_they_are_two_objects() -> None:
    model = Model(0, tied=False)
    assert ModuleTarget(model).manifest().aliases == {}
    model.lm_head.weight.data = model.model.embed.weight.data
    assert ModuleTarget(model).manifest().aliases == {"lm_head.weight": "model.embed.weight"}


def test_names_survive_wrapping_by_peft() -> None:
    model = Model(0)
    before = ModuleTarget(model).manifest()
    target = ModuleTarget(model)
    inject_adapter_in_model(LoraConfig(target_modules=["up", "down"], r=2), model)
    assert any("lora_A" in name for name in model.state_dict())
    assert ModuleTarget(model).manifest() == before
    assert target.manifest() == before
    new = torch.rand(72, 24).bfloat16()
    target.load([("model.layers.2.up.weight", new)])
    assert torch.equal(model.state_dict()["model.layers.2.up.base_layer.weight"], new)


def test_names_survive_wrapping_by_torch_compile() -> None:
    model = Model(0)
    before = ModuleTarget(model).manifest()
    model.model.layers[1] = torch.compile(model.model.layers[1])  # type: ignore[assignment]
    assert ModuleTarget(torch.compile(model)).manifest() == before  # type: ignore[arg-type]


def test_loading_copies_in_place_and_leaves_gradients_alone() -> None:
    model = Model(0)
    target = ModuleTarget(model)
    address = model.model.embed.weight.data_ptr()
    new = torch.rand(61, 24).bfloat16()
    target.load([("lm_head.weight", new)])
    assert model.model.embed.weight.data_ptr() == address
    assert torch.equal(model.model.embed.weight, new)
    assert torch.equal(target.read("lm_head.weight"), new)
    assert model.model.embed.weight.requires_grad


def test_a_name_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(WeightTransferFailed, match="no tensor 'nothing'"):
        ModuleTarget(Model(0)).read("nothing")


def test_memory_that_was_given_back_is_named() -> None:
    model = Model(0)
    target = ModuleTarget(model)
    manifest = target.manifest()
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
    assert target.manifest() == manifest
    with pytest.raises(EngineStateError, match=r"model\.embed\.weight was given back.*wake_up") as caught:
        target.check_ready()
    assert caught.value.state == "asleep"
    with pytest.raises(EngineStateError):
        target.load([("model.layers.0.down.weight", torch.zeros(24, 72, dtype=torch.float16))])


def test_an_empty_parameter_needs_no_memory() -> None:
    model = nn.Module()
    model.register_parameter("none", nn.Parameter(torch.empty(0, 4)))
    target = ModuleTarget(model)
    target.check_ready()
    target.load([("none", torch.empty(0, 4))])
