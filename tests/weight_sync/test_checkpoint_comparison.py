"""Compare an engine's tensors with the checkpoint that it loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync import ModuleTarget
from drivetrain_weight_sync.receiver.checkpoint_comparison import require_as_stored


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
