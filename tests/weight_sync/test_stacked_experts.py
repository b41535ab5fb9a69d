"""Tensors that transformers stacks are named, sent and loaded as the checkpoint holds them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tests.weight_sync.models import Model, bits, tensors_of
from torch import nn
from transformers import AutoModelForCausalLM

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.testing import ARCHITECTURES, tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_weight_sync import ModuleTarget
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.source import Source, by_name

MIXTURES = ["qwen2_moe", "qwen3_moe", "mixtral"]


def load(architecture: str, seed: int = 0) -> nn.Module:
    with no_progress_bars():
        module: nn.Module = AutoModelForCausalLM.from_pretrained(tiny_model(architecture, seed=seed))
    return module


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_module_is_named_as_its_checkpoint(architecture: str) -> None:
    stored = load_file(tiny_model(architecture) / "model.safetensors")
    module = load(architecture)
    manifest = ModuleTarget(module).manifest()
    assert {spec.name for spec in manifest.tensors} == {manifest.aliases.get(name, name) for name in stored}
    sent = by_name(Source(nn.ModuleDict({"module": module})).pairs())
    for name, tensor in stored.items():
        assert bits(sent[name]) == bits(tensor), name


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_are_loaded_into_their_place_in_the_stack(architecture: str) -> None:
    served, trained = load(architecture), load(architecture, seed=1)
    target = ModuleTarget(served)
    target.load(load_file(tiny_model(architecture, seed=1) / "model.safetensors").items())
    for name, tensor in trained.state_dict().items():
        assert torch.equal(served.state_dict()[name], tensor), name


def test_pieces_are_views_of_the_stack() -> None:
    module = load("qwen3_moe")
    named = by_checkpoint_name(module, module.state_dict())
    addresses = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in named.values()} == addresses
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in named


def test_tensors_keep_the_order_of_the_module() -> None:
    for architecture in ("qwen2", "qwen3_moe"):
        module = load(architecture)
        own = list(module.state_dict())
        kept = [name for name in by_checkpoint_name(module, module.state_dict()) if name in own]
        assert kept == [name for name in own if name in kept]


def test_other_modules_keep_their_names() -> None:
    model = Model(0)
    assert by_checkpoint_name(model, tensors_of(model)).keys() == tensors_of(model).keys()


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_state_dict_is_named_by_the_class_of_the_engines_model(architecture: str) -> None:
    folder = tiny_model(architecture)
    module = load(architecture)
    manifest = ModuleTarget(module).manifest()
    names = InMemoryNames(EngineConfig(backend="transformers", model=str(folder)))
    held = by_name(Source(module.state_dict(), names).pairs(manifest))
    groups = Source(module.named_parameters, names).stream(manifest)
    streamed = dict(pair for group in groups for pair in group)
    for sent in (held, streamed):
        assert {manifest.aliases.get(name, name) for name in sent} == {spec.name for spec in manifest.tensors}
        for name, tensor in by_name(Source(module).pairs()).items():
            assert bits(sent[name]) == bits(tensor), name


def test_names_that_the_class_does_not_know_stay_as_they_are() -> None:
    module = load("qwen3_moe")
    names = InMemoryNames(EngineConfig(backend="transformers", model=str(tiny_model("qwen3_moe"))))
    given = module.state_dict() | {"model.ghost.weight": torch.ones(2)}
    assert by_name(Source(given, names).pairs(ModuleTarget(module).manifest())).keys() == given.keys()
