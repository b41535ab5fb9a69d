"""Translation between drivetrain's names and those of transformers, by pure functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drivetrain import EngineConfig, InvalidConfig, create_engine
from drivetrain.testing import tiny_model
from drivetrain_transformers.model import LoadedModel
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


def test_the_model_is_on_the_device_that_is_asked_for() -> None:
    loaded = LoadedModel.load(config(model=str(tiny_model("qwen2")), device="cpu"), lambda _: None)
    assert {str(tensor.device) for tensor in loaded.module.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_model_has_the_attention_that_is_asked_for(name: str) -> None:
    loaded = LoadedModel.load(config(model=str(tiny_model("qwen2")), attention_backend=name), lambda _: None)
    assert loaded.module.config._attn_implementation == name


def test_an_unknown_attention_is_refused_before_the_start() -> None:
    with pytest.raises(InvalidConfig, match="attention_backend='flashy': transformers has no such") as error:
        create_engine("transformers", model=str(tiny_model("qwen2")), attention_backend="flashy")
    assert error.value.field == "attention_backend"


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
