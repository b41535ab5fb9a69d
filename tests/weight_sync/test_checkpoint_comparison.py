"""Compare an engine's tensors with the checkpoint that it loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain.errors import EngineStartError, WeightSyncError
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync import ModuleTarget
from drivetrain_weight_sync.receiver.checkpoint_comparison import require_as_stored, require_complete


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8)).to(torch.bfloat16)


@pytest.fixture
def folder(module: nn.Module, tmp_path: Path) -> Path:
    stored = {name: tensor.float() for name, tensor in module.state_dict().items()}
    stored["another"] = torch.zeros(3)
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path


def test_what_lies_where_it_was_copied_to_is_fine(module: nn.Module, folder: Path) -> None:
    require_as_stored(ModuleTarget(module), folder)


@torch.no_grad()
def test_what_was_packed_is_named(module: nn.Sequential, folder: Path) -> None:
    packed = module[1]
    assert isinstance(packed, nn.Linear)
    packed.weight.copy_(packed.weight.flatten().reshape(4, 8).T.clone())
    with pytest.raises(WeightSyncError, match=re.escape("1.weight")) as caught:
        require_as_stored(ModuleTarget(module), folder)
    assert "0.weight" not in str(caught.value)


def test_what_has_another_shape_is_named(module: nn.Sequential, folder: Path) -> None:
    padded = module[0]
    assert isinstance(padded, nn.Linear)
    padded.bias = nn.Parameter(torch.cat([padded.bias, padded.bias]))
    with pytest.raises(WeightSyncError, match=re.escape("0.bias")):
        require_as_stored(ModuleTarget(module), folder)


def test_a_folder_without_safetensors_says_nothing(module: nn.Module, tmp_path: Path) -> None:
    require_as_stored(ModuleTarget(module), tmp_path)


# Whole checkpoints ---------------------------------------------------------------------------------------------------


def stored(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


TENSORS = {
    "0__weight": torch.ones(4, 6),
    "0__bias": torch.ones(4),
    "1__weight": torch.ones(8, 4),
    "1__bias": torch.ones(8),
}


def test_a_whole_checkpoint_is_fine(module: nn.Module, tmp_path: Path) -> None:
    require_complete(stored(tmp_path, **TENSORS), ModuleTarget(module).manifest())


def test_of_tied_tensors_either_is_enough(tmp_path: Path) -> None:
    tied = WeightManifest((TensorSpec("embed", "float32", (4, 2)),), {"head": "embed"})
    require_complete(stored(tmp_path, head=torch.ones(4, 2)), tied)


def test_a_tensor_that_lacks_is_named(module: nn.Module, tmp_path: Path) -> None:
    fewer = {name: tensor for name, tensor in TENSORS.items() if name != "1__bias"}
    with pytest.raises(EngineStartError, match=r"lacks 1\.bias;"):
        require_complete(stored(tmp_path, **fewer), ModuleTarget(module).manifest())


def test_a_tensor_of_another_shape_is_named(module: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=re.escape("has 1.weight (8, 3), not (8, 4);")):
        require_complete(
            stored(tmp_path, **{**TENSORS, "1__weight": torch.ones(8, 3)}), ModuleTarget(module).manifest()
        )


def test_a_folder_with_other_names_is_left_to_the_engine(module: nn.Module, tmp_path: Path) -> None:
    require_complete(
        stored(tmp_path, **{"0__weight": torch.ones(2), "0__scales": torch.ones(2)}), ModuleTarget(module).manifest()
    )


def test_a_file_that_cannot_be_read_is_named(module: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"{")
    with pytest.raises(EngineStartError, match=r"model\.safetensors.*cannot be read"):
        require_complete(tmp_path, ModuleTarget(module).manifest())
