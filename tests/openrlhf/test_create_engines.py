"""OpenRLHF's arguments for its engines are honoured or refused by name, before any actor is made."""

from __future__ import annotations

from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup

from drivetrain import DrivetrainError, InvalidConfig, UnsupportedCapability
from drivetrain_trainers.openrlhf import create_engines_with

ARGUMENTS: dict[str, Any] = {
    "num_engines": 1,
    "tensor_parallel_size": 1,
    "pretrain": "model",
    "seed": 42,
    "full_determinism": False,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "max_model_len": 128,
}


@pytest.mark.parametrize(
    ("more", "error", "named"),
    [
        ({"max_images_per_prompt": 1}, UnsupportedCapability, "max_images_per_prompt=1"),
        ({"enforce_eager": True}, InvalidConfig, "enforce_eager=True"),
        ({"logprobs_mode": "raw_logits"}, InvalidConfig, "logprobs_mode='raw_logits'"),
        ({"tensor_parallel_size": 2, "shared_pg": PlacementGroup.empty()}, InvalidConfig, "shared_pg"),
        ({"max_model_len": 0}, InvalidConfig, "context_length"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused(
    more: dict[str, Any], error: type[DrivetrainError], named: str
) -> None:
    with pytest.raises(error, match=named):
        create_engines_with("transformers")(**{**ARGUMENTS, **more})


@pytest.mark.parametrize("field", ["tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"])
def test_engines_have_the_ranks_that_the_trainer_counts(field: str) -> None:
    with pytest.raises(InvalidConfig, match="ranks for each engine"):
        create_engines_with("transformers", **{field: 2})(**ARGUMENTS)


def test_an_engine_is_a_name_a_mapping_or_a_file() -> None:
    with pytest.raises(InvalidConfig, match="backend=7"):
        create_engines_with(7)  # type: ignore[arg-type]
