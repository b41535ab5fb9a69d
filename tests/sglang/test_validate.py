"""Values that SGLang would not honour are refused before anything is started."""

from __future__ import annotations

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_sglang.engine import SGLangBackend


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"engine_kwargs": {"skip_tokenizer_init": 5}}, "engine_kwargs", "skip_tokenizer_init"),
        ({"context_length": 5000}, "context_length", "more than the model's 1024"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 2}, "expert_parallel_size", "over all ranks"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, "expert_parallel_size", "no experts to spread"),
    ],
)
def test_a_wrong_value_is_refused(fields: dict[str, object], field: str, words: str) -> None:
    given = {"backend": "sglang", "model": str(tiny_model("qwen2")), "device": "cpu", **fields}
    with pytest.raises(InvalidConfig, match=words) as caught:
        SGLangBackend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == field


def test_a_model_that_is_no_folder_is_left_to_the_start() -> None:
    config = EngineConfig(backend="sglang", model="organisation/name", device="cpu", context_length=5000)
    SGLangBackend.validate(config)


def test_adapters_of_a_mixture_of_experts_are_refused_on_a_cpu() -> None:
    given = {"backend": "sglang", "model": str(tiny_model("qwen3_moe")), "enable_lora": True, "dtype": "bfloat16"}
    with pytest.raises(InvalidConfig, match=r"experts=4.* only on a GPU") as caught:
        SGLangBackend.validate(EngineConfig.model_validate(given | {"device": "cpu"}))
    assert caught.value.field == "enable_lora"
    SGLangBackend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
    SGLangBackend.validate(EngineConfig.model_validate(given | {"device": "cpu", "enable_lora": False}))


def test_latent_attention_is_refused_for_attention_in_plain_torch() -> None:
    given: dict[str, object] = {"backend": "sglang", "model": str(tiny_model("deepseek_v3")), "device": "cpu"}
    with pytest.raises(InvalidConfig, match="deepseek_v3 has multi-head latent attention") as caught:
        SGLangBackend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == "attention_backend"
    SGLangBackend.validate(EngineConfig.model_validate(given | {"attention_backend": "intel_amx"}))
    SGLangBackend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
