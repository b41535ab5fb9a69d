"""Translation between drivetrain's names and those of transformers, by pure functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drivetrain import EngineConfig, InvalidConfig
from drivetrain_transformers.translate import (
    context_length,
    load_arguments,
)


def config(**fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "transformers", "model": "x", "device": "cpu", **fields})


def test_fields_reach_from_pretrained_under_its_own_names() -> None:
    arguments = load_arguments(
        config(dtype="bfloat16", revision="abc", attention_backend="eager", engine_kwargs={"use_safetensors": True})
    )
    assert arguments == {
        "dtype": "bfloat16",
        "revision": "abc",
        "attn_implementation": "eager",
        "trust_remote_code": False,
        "use_safetensors": True,
    }


def test_a_field_set_twice_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="engine_kwargs holds dtype"):
        load_arguments(config(engine_kwargs={"dtype": "float16"}))


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_the_context_is_the_models_own_unless_less_is_asked_for(name: str) -> None:
    model = SimpleNamespace(**{name: 512})
    assert context_length(model, config()) == 512
    assert context_length(model, config(context_length=100)) == 100
    with pytest.raises(InvalidConfig, match="more than the model's 512"):
        context_length(model, config(context_length=513))
