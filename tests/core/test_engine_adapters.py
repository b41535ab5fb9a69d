"""Behaviour that the SGLang and the vLLM backend share, with neither engine installed."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

import drivetrain_sglang.in_engine
import drivetrain_sglang.translate
import drivetrain_vllm.in_engine
import drivetrain_vllm.translate
from drivetrain import Backend, EngineConfig, InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_vllm.engine import VLLMBackend

ENGINES: list[type[Backend]] = [SGLangBackend, VLLMBackend]
TRANSLATIONS = {"sglang": drivetrain_sglang.translate, "vllm": drivetrain_vllm.translate}


@pytest.mark.parametrize("named", [None, "", "mine", "mine,drivetrain"])
@pytest.mark.parametrize(
    ("in_engine", "variable", "without"),
    [(drivetrain_sglang.in_engine, "SGLANG_PLUGINS", ""), (drivetrain_vllm.in_engine, "VLLM_PLUGINS", "drivetrain")],
)
def test_an_engines_processes_load_our_plugin_beside_those_that_are_named(
    monkeypatch: pytest.MonkeyPatch, in_engine: ModuleType, variable: str, without: str, named: str | None
) -> None:
    monkeypatch.setenv(in_engine.SOCKET_VARIABLE, "before")
    monkeypatch.setenv(variable, named or "")
    if named is None:
        monkeypatch.delenv(variable)
    in_engine.invite("a socket")
    assert os.environ[in_engine.SOCKET_VARIABLE] == "a socket"
    assert os.environ.get(variable) == {None: None, "": without}.get(named, "mine,drivetrain")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"context_length": 5000}, "context_length", "more than the model's 1024"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 2}, "expert_parallel_size", "over all ranks"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, "expert_parallel_size", "no experts to spread"),
    ],
)
@pytest.mark.parametrize("backend", ENGINES)
def test_a_wrong_value_is_refused_before_a_start(
    backend: type[Backend], fields: dict[str, object], field: str, words: str
) -> None:
    given = {"backend": backend.name, "model": str(tiny_model("qwen2")), "device": "cpu", **fields}
    with pytest.raises(InvalidConfig, match=words) as caught:
        backend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == field


@pytest.mark.parametrize(("backend", "name"), [(SGLangBackend, "skip_tokenizer_init"), (VLLMBackend, "max_model_len")])
def test_an_argument_that_the_backend_sets_is_refused(backend: type[Backend], name: str) -> None:
    given = {"backend": backend.name, "model": str(tiny_model("qwen2")), "device": "cpu", "engine_kwargs": {name: 5}}
    with pytest.raises(InvalidConfig, match=name) as caught:
        backend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == "engine_kwargs"


@pytest.mark.parametrize("backend", ENGINES)
def test_a_model_that_is_no_folder_is_left_to_the_start(backend: type[Backend]) -> None:
    backend.validate(EngineConfig(backend=backend.name, model="organisation/name", device="cpu", context_length=5000))


@pytest.mark.parametrize("backend", ENGINES)
def test_adapters_of_a_mixture_of_experts_are_refused_on_a_cpu(backend: type[Backend]) -> None:
    given = {"backend": backend.name, "model": str(tiny_model("qwen3_moe")), "enable_lora": True, "dtype": "bfloat16"}
    with pytest.raises(InvalidConfig, match=r"experts=4.* only on a GPU") as caught:
        backend.validate(EngineConfig.model_validate(given | {"device": "cpu"}))
    assert caught.value.field == "enable_lora"
    backend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
    backend.validate(EngineConfig.model_validate(given | {"device": "cpu", "enable_lora": False}))


def arguments(engine: str, device: str, **fields: object) -> dict[str, object]:
    config = EngineConfig.from_mapping({"backend": engine, "model": "m", **fields})
    made: dict[str, object] = TRANSLATIONS[engine].engine_arguments(config, device, "bfloat16", 64)
    return made


@pytest.mark.parametrize(
    ("engine", "share", "cache"),
    [
        ("sglang", "mem_fraction_static", "max_total_tokens"),
        ("vllm", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    ],
)
def test_a_share_of_a_gpu_is_refused_without_one(engine: str, share: str, cache: str) -> None:
    assert arguments(engine, "cuda", gpu_memory_utilization=0.4)[share] == 0.4
    with pytest.raises(InvalidConfig, match=rf"gpu_memory_utilization=0.4: .*{cache}") as error:
        arguments(engine, "cpu", gpu_memory_utilization=0.4)
    assert error.value.field == "gpu_memory_utilization"


@pytest.mark.parametrize(
    ("engine", "own", "other"), [("sglang", "torch_native", "flashinfer"), ("vllm", "CPU_ATTN", "FLASH_ATTN")]
)
def test_attention_that_a_cpu_does_not_have_is_refused(engine: str, own: str, other: str) -> None:
    assert arguments(engine, "cpu", attention_backend=own)["attention_backend"] == own
    assert arguments(engine, "cuda", attention_backend=other)["attention_backend"] == other
    with pytest.raises(InvalidConfig, match=rf"attention_backend='{other}': on a CPU .* {own}") as error:
        arguments(engine, "cpu", attention_backend=other)
    assert error.value.field == "attention_backend"
