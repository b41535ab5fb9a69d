"""A configuration is checked against the model's ``config.json``, where that file says enough."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drivetrain import create_engine
from drivetrain.backend.toolkit.model_folder import (
    check_model_folder,
    config_levels,
    experts_of,
    require_dense_for_adapters,
    require_files,
)
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig


def check(folder: Path, fields: object, **configured: object) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    config = EngineConfig.from_mapping({"backend": "any", "model": str(folder), **configured})
    check_model_folder(config, "the engine")


@pytest.mark.parametrize(
    "fields", [{"max_position_embeddings": 64}, {"text_config": {"max_position_embeddings": 64}}], ids=["flat", "text"]
)
def test_a_context_that_is_longer_than_the_models_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    check(tmp_path, fields, context_length=64)
    with pytest.raises(InvalidConfig, match="context_length=65 is more than the model's 64"):
        check(tmp_path, fields, context_length=65)


def test_a_context_that_needs_two_sets_of_frequencies_is_refused(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    fields = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_scaling": rope}
    check(tmp_path, fields, context_length=32)
    with pytest.raises(InvalidConfig, match="give context_length=32 or less"):
        check(tmp_path, fields)


@pytest.mark.parametrize("fields", [{}, [], "a string", {"max_position_embeddings": None}, {"text_config": {}}])
def test_a_file_that_does_not_say_enough_is_left_to_the_start(tmp_path: Path, fields: object) -> None:
    check(tmp_path, fields, context_length=65)


def test_a_file_that_cannot_be_read_is_left_to_the_start(tmp_path: Path) -> None:
    assert config_levels(str(tmp_path)) == []
    (tmp_path / "config.json").write_bytes(b"{")
    assert config_levels(str(tmp_path)) == []
    assert config_levels("organisation/name") == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_with_a_fifo_is_refused_unread(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidConfig, match=f"{name} is neither a file nor a folder"):
        create_engine("transformers", model=str(tmp_path))


def test_links_and_folders_in_a_model_folder_are_ordinary(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"{}")
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    (tmp_path / "gone.json").symlink_to(tmp_path / "missing")
    (tmp_path / "original").mkdir()
    require_files(str(tmp_path))
    require_files("organisation/name")
    require_files("~nobody-here/model")


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_adapters_of_a_mixture_are_refused_where_they_need_a_gpu(tmp_path: Path, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {field: 8}}))
    levels = config_levels(str(tmp_path))
    assert experts_of(levels) == f"{field}=8"
    given = EngineConfig(backend="any", model=str(tmp_path))
    require_dense_for_adapters(given, levels, "the engine")
    with pytest.raises(InvalidConfig, match=f"{field}=8.* the engine .* only on a GPU") as caught:
        require_dense_for_adapters(given.model_copy(update={"enable_lora": True}), levels, "the engine")
    assert caught.value.field == "enable_lora"


@pytest.mark.parametrize("fields", [{}, {"num_experts": 0}, {"num_experts": 1}, {"num_experts": None}])
def test_a_model_of_one_expert_or_none_takes_adapters(fields: dict[str, object]) -> None:
    given = EngineConfig(backend="any", model="organisation/name", enable_lora=True)
    require_dense_for_adapters(given, [fields], "the engine")
