"""Values that vLLM would not honour are refused before anything is started."""

from __future__ import annotations

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.translate import refuse_plain_latent_attention


def test_adapters_in_float32_are_refused_on_a_gpu() -> None:
    given = {"backend": "vllm", "model": str(tiny_model("qwen2")), "enable_lora": True, "dtype": "float32"}
    with pytest.raises(InvalidConfig, match="float16 or bfloat16") as caught:
        VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
    assert caught.value.field == "dtype"
    VLLMBackend.validate(EngineConfig.model_validate(given | {"device": "cpu"}))


def test_missing_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = EngineConfig(backend="vllm", model="organisation/name", device="cuda:1", tensor_parallel_size=2)
    with pytest.raises(InvalidConfig, match="needs more than the GPUs 0, 1") as caught:
        VLLMBackend.validate(config)
    assert caught.value.field == "device"


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
