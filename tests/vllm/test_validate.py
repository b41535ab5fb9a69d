"""Values that vLLM would not honour are refused before anything is started."""

from __future__ import annotations

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.translate import refuse_plain_latent_attention


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"engine_kwargs": {"max_model_len": 5}}, "engine_kwargs", "max_model_len"),
        ({"context_length": 5000}, "context_length", "more than the model's 1024"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 2}, "expert_parallel_size", "over all ranks"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, "expert_parallel_size", "no experts to spread"),
    ],
)
def test_a_wrong_value_is_refused(fields: dict[str, object], field: str, words: str) -> None:
    given = {"backend": "vllm", "model": str(tiny_model("qwen2")), "device": "cpu", **fields}
    with pytest.raises(InvalidConfig, match=words) as caught:
        VLLMBackend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == field


def test_adapters_in_float32_are_refused_on_a_gpu() -> None:
    given = {"backend": "vllm", "model": str(tiny_model("qwen2")), "enable_lora": True, "dtype": "float32"}
    with pytest.raises(InvalidConfig, match="float16 or bfloat16") as caught:
        VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
    assert caught.value.field == "dtype"
    VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cpu"}))


def test_a_model_that_is_no_folder_is_left_to_the_start() -> None:
    config = EngineConfig(backend="vllm", model="organisation/name", device="cpu", context_length=5000)
    VLLMBackend.validate(config)


def test_missing_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = EngineConfig(backend="vllm", model="organisation/name", device="cuda:1", tensor_parallel_size=2)
    with pytest.raises(InvalidConfig, match="needs more than the GPUs 0, 1") as caught:
        VLLMBackend.validate(config)
    assert caught.value.field == "device"


def test_adapters_of_a_mixture_of_experts_are_refused_on_a_cpu() -> None:
    given = {"backend": "vllm", "model": str(tiny_model("qwen3_moe")), "enable_lora": True, "dtype": "bfloat16"}
    with pytest.raises(InvalidConfig, match=r"experts=4.* only on a GPU") as caught:
        VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cpu"}))
    assert caught.value.field == "enable_lora"
    VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
    VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cpu", "enable_lora": False}))


def test_latent_attention_without_positions_is_refused_on_a_cpu() -> None:
    plain = tiny_model("deepseek_v3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    given = {"backend": "vllm", "model": str(plain), "device": "cpu"}
    with pytest.raises(InvalidConfig, match="deepseek_v3 has multi-head latent attention with plain") as caught:
        VLLMBackend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == "model"
    VLLMBackend.validate(EngineConfig.model_validate(given | {"model": str(tiny_model("deepseek_v3"))}))
    old: list[dict[str, object]] = [{"kv_lora_rank": 512, "rope_scaling": {"type": "yarn"}}, {"rope_scaling": None}]
    refuse_plain_latent_attention(old)
    with pytest.raises(InvalidConfig):
        refuse_plain_latent_attention([{"kv_lora_rank": 512, "rope_scaling": None}])
