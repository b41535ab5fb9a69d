"""Models that a backend refuses to start for."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import Capability, EngineConfig, UnsupportedCapability
from drivetrain.engine.config_checks import check_config
from drivetrain.testing import tiny_model

GENERATES = frozenset({Capability.LOGPROBS_RAW})


def test_an_engine_for_dense_models_refuses_a_mixture_of_experts_before_it_starts() -> None:
    config = EngineConfig(backend="dense", model=str(tiny_model("qwen3_moe")))
    with pytest.raises(UnsupportedCapability, match="experts=") as refusal:
        check_config(config, {}, GENERATES)
    assert refusal.value.capability == "moe"
    check_config(config, {}, GENERATES | {Capability.MOE})


def test_a_dense_model_and_a_hub_id_need_no_capability(tmp_path: Path) -> None:
    for model in (str(tiny_model("qwen2")), "organisation/name", str(tmp_path)):
        check_config(EngineConfig(backend="dense", model=model), {}, GENERATES)


def test_a_broken_config_file_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2")
    check_config(EngineConfig(backend="dense", model=str(tmp_path)), {}, GENERATES)
