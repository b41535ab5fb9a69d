# pyright: reportMissingImports=false
"""The plugin against the real verl, without Ray: its registration, configuration and sampling parameters."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from pathlib import Path

import pytest
import verl.workers.rollout.replica as replica_module
from hydra.errors import InstantiationException  # type: ignore[import-not-found]
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from pydantic import BaseModel
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig, DistillationConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry

from drivetrain import BackendUnavailable, InvalidConfig, InvalidRequest, LogprobsMode, SamplingParams
from drivetrain.testing import tiny_model
from drivetrain_trainers.verl.prompt_scores import top_k_of
from drivetrain_trainers.verl.replica import DrivetrainReplica
from drivetrain_trainers.verl.rollout import DrivetrainRollout
from drivetrain_trainers.verl.sampling import Lengths, sampling_params
from drivetrain_trainers.verl.settings import engine_config
from drivetrain_trainers.verl.teacher import TeacherConfig

LENGTHS = Lengths(prompt=32, response=16, context=64)


def rollout(**fields: object) -> RolloutConfig:
    engine = {"drivetrain": {"backend": "transformers"}}
    return RolloutConfig(**{"name": "drivetrain", "tensor_model_parallel_size": 1, "engine_kwargs": engine} | fields)


@pytest.fixture(scope="module")
def model() -> HFModelConfig:
    return HFModelConfig(path=str(tiny_model("qwen2")), override_config={"attn_implementation": "sdpa"})


def test_verl_finds_the_plugin_by_its_entry_point() -> None:
    assert RolloutReplicaRegistry.get("drivetrain") is DrivetrainReplica
    assert get_rollout_class("drivetrain") is DrivetrainRollout


def test_a_verl_that_lacks_a_feature_is_refused_by_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    class Output(BaseModel):
        token_ids: list[int]
        log_probs: list[float]
        routed_experts: list[int]
        stop_reason: str

    monkeypatch.setattr("drivetrain_trainers.verl.features.TokenOutput", Output)
    with pytest.raises(BackendUnavailable, match=r"has no TokenOutput\.extra_fields.*verl==0\.9\.1"):
        replica_module.get_rollout_replica_class("drivetrain")


def test_one_word_chooses_the_engine(model: HFModelConfig) -> None:
    config = engine_config(rollout(), model)
    assert (config.backend, config.model, config.dtype) == ("transformers", model.local_path, "bfloat16")
    assert config.logprobs_mode is LogprobsMode.PROCESSED
    assert engine_config(rollout(engine_kwargs={"drivetrain": {"backend": "vllm"}}), model).backend == "vllm"


def test_defaults_of_verl_that_a_backend_has_no_equivalent_for_are_left_out_and_other_values_kept(
    model: HFModelConfig,
) -> None:
    assert engine_config(rollout(), model).gpu_memory_utilization is None
    assert engine_config(rollout(gpu_memory_utilization=0.3), model).gpu_memory_utilization == 0.3
    assert engine_config(rollout(max_num_seqs=7), model).max_num_seqs == 7
    on_sglang = rollout(engine_kwargs={"drivetrain": {"backend": "sglang"}})
    assert engine_config(on_sglang, model, device="cuda").gpu_memory_utilization == 0.5
    assert engine_config(on_sglang, model, device="cpu").gpu_memory_utilization is None


def test_fields_of_the_engine_overrule_those_of_verl(model: HFModelConfig) -> None:
    engine = {"backend": "transformers", "dtype": "float32", "timeouts": {"start": 9.0}}
    config = engine_config(rollout(engine_kwargs={"drivetrain": engine}), model)
    assert (config.dtype, config.timeouts.start) == ("float32", 9.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_kwargs": {}}, r"engine_kwargs\.drivetrain\.backend is not set; expected the name of a backend"),
        ({"enforce_eager": True}, r"rollout\.enforce_eager=True: .* pass the engine's own argument"),
        ({"quantization": "fp8"}, r"rollout\.quantization='fp8'"),
        ({"scheduling_policy": "priority"}, r"rollout\.scheduling_policy='priority'"),
        ({"over_sample_rate": 0.1}, r"rollout\.over_sample_rate=0\.1"),
        ({"disable_log_stats": False}, r"rollout\.disable_log_stats=False"),
        ({"logprobs_mode": "raw_logits"}, r"logprobs_mode='raw_logits': expected one of raw_logprobs"),
        ({"dtype": "fp8"}, "dtype"),
        ({"engine_kwargs": {"drivetrain": {"backend": "transformers", "colour": 1}}}, "colour"),
    ],
)
def test_what_no_engine_honours_is_refused_by_name(
    fields: dict[str, object], message: str, model: HFModelConfig
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        engine_config(rollout(**fields), model)


def test_an_engine_is_prepared_for_adapters_that_are_not_merged(model: HFModelConfig) -> None:
    for fields in ({"lora_rank": 8}, {"lora": {"rank": 8, "merge": False}}):
        config = engine_config(rollout(), dataclasses.replace(model, **fields))
        assert (config.enable_lora, config.max_lora_rank) == (True, 8)
    merged = dataclasses.replace(model, lora_rank=8, lora={"merge": True})
    assert not engine_config(rollout(), merged).enable_lora


def test_adapters_for_engines_on_gpus_of_their_own_must_be_merged(model: HFModelConfig) -> None:
    separate = rollout(checkpoint_engine=CheckpointEngineConfig(backend="drivetrain"))
    with pytest.raises(InvalidConfig, match=r"checkpoint_engine\.backend='drivetrain': .*lora\.merge=true"):
        engine_config(separate, dataclasses.replace(model, lora_rank=8))
    engine_config(separate, dataclasses.replace(model, lora_rank=8, lora={"merge": True}))


def test_a_replica_on_several_nodes_and_a_reward_model_are_refused() -> None:
    def replica(gpus_per_node: int = 1, **kind: bool) -> DrivetrainReplica:
        config = rollout(tensor_model_parallel_size=2 if not kind else 1)
        return DrivetrainReplica(0, config, None, gpus_per_node=gpus_per_node, **kind)

    for made, refusal in (
        (replica(), "asks for 2 GPUs a replica, on 2 nodes of 1; expected one node"),
        (replica(is_reward_model=True), "verl asks reward models by HTTP"),
        # Accepted, but verl has not given them workers yet:
        (replica(gpus_per_node=2), "the workers of replica 0 are on 0 nodes"),
        (replica(is_teacher_model=True), "the workers of replica 0 are on 0 nodes"),
    ):
        with pytest.raises(InvalidConfig, match=refusal):
            asyncio.run(made.launch_servers())


def test_a_teacher_takes_verls_defaults_and_is_refused_by_its_own_names(model: HFModelConfig) -> None:
    config = engine_config(rollout(enforce_eager=True), model, mode="colocated", is_teacher=True)
    assert (config.enable_sleep, config.sleep_keeps_weights) == (False, False)
    for fields, message in (
        ({"quantization": "fp8"}, r"^distillation\.teacher_models\.\*\.inference\.quantization='fp8'"),
        ({"engine_kwargs": {}}, r"^distillation\.teacher_models\.\*\.inference\.engine_kwargs\.drivetrain\.backend"),
    ):
        with pytest.raises(InvalidConfig, match=message) as raised:
            engine_config(rollout(**fields), model, is_teacher=True)
        assert raised.value.field.startswith("distillation.teacher_models.*.inference.")


def distillation(teacher: str, topk: int | None, loss: str = "forward_kl_topk") -> DistillationConfig:
    """Return verl's configuration, made from its own file, as each of its processes makes it."""
    path = Path(inspect.getfile(DistillationConfig)).parents[2] / "trainer/config/distillation/distillation.yaml"
    config = OmegaConf.load(path)
    del config["defaults"]
    one = config.teacher_models.teacher_model
    names = {"name": "drivetrain", "dtype": "float32", "prompt_length": 8, "response_length": 8, "temperature": 1.0}
    one.inference = {**one.inference, **names, "tensor_model_parallel_size": 1}
    one["_target_"], one.model_path = teacher, "teacher"
    config.enabled, config.n_gpus_per_node, config.nnodes = True, 1, 1
    config.distillation_loss.loss_mode, config.distillation_loss.topk = loss, topk
    made: DistillationConfig = omega_conf_to_dataclass(config)
    return made


def test_a_loss_over_likely_tokens_needs_our_class_of_the_teacher() -> None:
    ours, theirs = (
        "drivetrain_trainers.verl.teacher.TeacherConfig",
        "verl.workers.config.DistillationTeacherModelConfig",
    )
    assert isinstance(distillation(ours, 32).teacher_models["default"], TeacherConfig)
    assert distillation(theirs, None, "k3").teacher_models["default"].inference.name == "drivetrain"
    with pytest.raises(InstantiationException, match="does not support inference engine drivetrain"):
        distillation(theirs, 32)
    with pytest.raises(InstantiationException, match="topk=None: this loss is over the teacher's most likely tokens"):
        distillation(ours, None)


@pytest.mark.parametrize("count", [-1, True, 1.5, "4"])
def test_a_number_of_likely_tokens_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs=.* expected a number of most likely tokens"):
        top_k_of(count)


def test_every_parameter_of_an_agent_loop_arrives() -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1, "logprobs": True}
    params = sampling_params(given, 8, LENGTHS, {"ignore_eos": True})
    expected = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.1,
        logprobs=0,
        ignore_eos=True,
        max_new_tokens=16,
    )
    assert params == expected


def test_names_of_vllm_and_sglang_mean_the_same() -> None:
    of_vllm = {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [3], "top_k": 4, "seed": 1, "stop": ["x"]}
    of_sglang = {"max_new_tokens": 5, "min_new_tokens": 2, "stop_token_ids": [3], "top_k": 4, "seed": 1, "stop": ["x"]}
    params = sampling_params(of_vllm, 8, LENGTHS, {})
    assert params == sampling_params(of_sglang, 8, LENGTHS, {})
    assert (params.max_new_tokens, params.min_new_tokens, params.top_k, params.seed) == (5, 2, 4, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 4}, r"sampling_params\.beam_width=4: the drivetrain rollout has no such parameter"),
        ({"n": 2}, r"sampling_params\.n=2: verl takes one response"),
        ({"top_p": 2.0}, r"top_p"),
        ({"temperature": -1.0}, r"temperature"),
        ({"logprobs": 5}, r"sampling_params\.logprobs=5: expected true or false"),
        ({"max_tokens": 2, "max_new_tokens": 3}, r"sampling_params\.max_tokens=2: expected one whole number"),
        ({"max_tokens": "many"}, r"sampling_params\.max_tokens='many'"),
    ],
)
def test_other_parameters_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        sampling_params(given, 8, LENGTHS, {})


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "budget"), [(8, None, 16), (40, None, 8), (60, None, 1), (60, 30, 4), (8, 30, 30)]
)
def test_a_response_is_bounded_as_by_verls_own_rollouts(prompt_tokens: int, asked: int | None, budget: int) -> None:
    assert LENGTHS.budget(prompt_tokens, asked) == budget


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt_ids has 64 tokens, and the engine's context is 64"):
        LENGTHS.budget(64, None)
