# pyright: reportMissingImports=false
"""Settings of TRL reach the engine, or are refused by name before any work: ``make test-trl``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from trl.trainer import grpo_trainer

from drivetrain import DrivetrainError, EngineState, InvalidRequest, UnsupportedCapability
from drivetrain_trainers.trl import generation, rollout
from tiny_grpo import PROMPTS, engine_of, logged, policy, trainer

LETTERS = [*range(ord("a"), ord("z") + 1)]
"""Token ids of lower-case letters: the tokenizer's ids are bytes."""


def rolled(**settings: Any) -> Any:
    with rollout(engine_of("transformers")) as rolling:
        training = trainer(policy(), rollout_func=rolling, **settings)
        return rolling([PROMPTS[0]] * 16, training), training


def test_the_length_and_the_greedy_choice_are_honoured() -> None:
    found, _ = rolled(max_completion_length=5, generation_kwargs={"do_sample": False})
    assert max(map(len, found["completion_ids"])) <= 5
    assert len({tuple(ids) for ids in found["completion_ids"]}) == 1


def test_tokens_that_are_suppressed_do_not_come() -> None:
    free, _ = rolled(max_completion_length=64)
    assert any(token in LETTERS for ids in free["completion_ids"] for token in ids)
    found, _ = rolled(max_completion_length=64, generation_kwargs={"suppress_tokens": LETTERS})
    assert not any(token in LETTERS for ids in found["completion_ids"] for token in ids)


def test_a_stop_string_ends_a_completion_which_holds_it() -> None:
    found, training = rolled(max_completion_length=64, generation_kwargs={"stop_strings": ["a", "e"]})
    texts = training.processing_class.batch_decode(found["completion_ids"], skip_special_tokens=True)
    stopped = [text for text in texts if "a" in text or "e" in text]
    assert stopped
    assert all(text[-1] in "ae" and not {"a", "e"} & set(text[:-1]) for text in stopped)


def test_a_completion_ends_at_trls_own_eos_and_no_other() -> None:
    found, training = rolled(max_completion_length=200)
    ends = {ids[-1] for ids in found["completion_ids"] if len(ids) < 200}
    assert ends
    assert ends <= set(training.eos_token_ids)
    unbounded, _ = rolled(max_completion_length=200, generation_kwargs={"ignore_eos": True})
    assert {len(ids) for ids in unbounded["completion_ids"]} == {200}


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-3}, {"min_p": 1.0}, {"temperature": 1e-3}], ids=str)
def test_each_bound_of_the_choice_is_honoured(setting: dict[str, Any]) -> None:
    found, _ = rolled(**setting)
    assert len({tuple(ids) for ids in found["completion_ids"]}) == 1


def test_a_repetition_penalty_is_honoured() -> None:
    greedy = {"do_sample": False, "ignore_eos": True}
    free, _ = rolled(max_completion_length=32, generation_kwargs=greedy)
    found, _ = rolled(max_completion_length=32, generation_kwargs=greedy, repetition_penalty=100.0)
    assert len(set(found["completion_ids"][0])) > len(set(free["completion_ids"][0]))


def test_trl_corrects_by_the_distribution_that_was_drawn_from() -> None:
    """With top_k, the engine's logprobs are those among the k tokens, so that the ratio is below 1."""
    with generation(engine_of("transformers")):
        training = trainer(policy(), use_vllm=True, top_k=10, vllm_importance_sampling_mode="token_truncate")
        training.train()
    assert min(logged(training, "sampling/sampling_logp_difference/mean")) > 0.5
    assert max(logged(training, "sampling/importance_sampling_ratio/max")) < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams.*no beam search"),
        ({"generation_kwargs": {"num_return_sequences": 4}}, "num_return_sequences=4: TRL decides how many"),
        ({"generation_kwargs": {"eos_token_id": "x"}}, "eos_token_id='x': expected a token id"),
        ({"cache_implementation": "static"}, "cache_implementation='static'.*leave it out"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True.*leave it out"),
    ],
)
def test_a_setting_that_a_rollout_does_not_do_is_refused_before_the_engine_starts(
    settings: dict[str, Any], message: str
) -> None:
    with rollout(engine_of("transformers")) as rolling:
        training = trainer(policy(), rollout_func=rolling, **settings)
        with pytest.raises(InvalidRequest, match=message):
            training.train()
        assert rolling.engine.state is EngineState.CREATED


def test_tools_are_refused_by_rollout_which_names_the_other_way() -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    with rollout(engine_of("transformers")) as rolling:
        training = trainer(policy(), rollout_func=rolling)
        training.tools = [add]
        with pytest.raises(InvalidRequest, match=r"tools and environments.*generation\(\)"):
            rolling([PROMPTS[0]], training)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_mode": "server"}, "vllm_mode='server': leave it at 'colocate'"),
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization=0.5: leave it out"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2: leave it out"),
        ({"vllm_max_model_length": 64}, "vllm_max_model_length=64: leave it out"),
        ({"vllm_model_impl": "transformers"}, "vllm_model_impl='transformers': leave it out"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True: pass sleep=True"),
        ({"generation_kwargs": {"logprobs": 5}}, "logprobs=5: TRL decides"),
        ({"generation_kwargs": {"bad_words": ["x"]}}, "bad_words.*to forbid tokens"),
        ({"generation_kwargs": {"structured_outputs": {"choice": ["a"]}}}, "expected one of json, regex, grammar"),
    ],
)
def test_a_setting_that_is_not_for_the_engine_is_refused_when_the_trainer_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with generation(engine_of("transformers")) as replaced:
        with pytest.raises(InvalidRequest, match=message):
            trainer(policy(), use_vllm=True, **settings)
        assert replaced.engine.state is EngineState.CREATED


def test_trls_own_class_is_back_after_the_context() -> None:
    theirs = grpo_trainer.VLLMGeneration
    with generation(engine_of("transformers")) as replaced:
        assert grpo_trainer.VLLMGeneration is replaced
    assert grpo_trainer.VLLMGeneration is theirs
    with pytest.raises(InvalidRequest), generation(engine_of("transformers"), lora_name="policy"):
        pass
    assert grpo_trainer.VLLMGeneration is theirs


def test_use_vllm_beside_rollout_func_is_refused() -> None:
    with generation(engine_of("transformers")), rollout(engine_of("transformers")) as rolling:
        training = trainer(policy(), rollout_func=rolling, use_vllm=True)
        with pytest.raises(InvalidRequest, match=r"use_vllm=True.*leave use_vllm out"):
            training.train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_name": "policy"}, "made without adapters; make it with enable_lora=True"),
        (
            {"lora_name": "policy", "sleep": True, "enable_lora": True},
            "only the adapter is pushed; leave lora_name out",
        ),
        ({"modle": "x"}, "modle"),
    ],
)
def test_arguments_that_conflict_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DrivetrainError, match=message):
        rollout(engine_of("transformers"), **arguments)


def test_another_release_of_trl_is_told_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with rollout(engine_of("transformers")) as rolling:
        training = trainer(policy(), rollout_func=rolling)
        monkeypatch.delattr(type(training), "_tokenize_prompts")
        with pytest.raises(UnsupportedCapability, match=r"has no _tokenize_prompts\. TRL 1\.16\.0 was seen to work"):
            training.train()
    monkeypatch.delattr(grpo_trainer, "VLLMGeneration")
    with pytest.raises(UnsupportedCapability, match="has no VLLMGeneration"):
        generation(engine_of("transformers"))


def test_one_engine_for_all_ranks_cannot_sleep() -> None:
    for opened in (rollout, generation):
        with pytest.raises(InvalidRequest, match="sleep=True: one engine for all ranks cannot sleep"):
            opened(engine_of("transformers"), share=True, sleep=True)


def test_a_single_process_may_share_its_engine() -> None:
    with rollout(engine_of("transformers"), share=True) as rolling:
        trainer(policy(), rollout_func=rolling).train()
        assert rolling.engine.get_weight_version() == "1"


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ((False, False), "Leave FSDP 1 and DeepSpeed out"),
        ((False, True), "Leave FSDP 1 and DeepSpeed out"),
        ((True, False), "pass share=True"),
    ],
    ids=["FSDP 1", "FSDP 1, shared", "an engine each"],
)
def test_a_policy_that_is_split_in_another_way_is_refused(case: tuple[bool, bool], remedy: str) -> None:
    """A stand-in for FSDP's accelerator: accelerate makes none on a CPU."""
    fsdp2, share = case
    split: Any = SimpleNamespace(
        num_processes=2, process_index=0, distributed_type=DistributedType.FSDP, is_fsdp2=fsdp2
    )
    refusal = f"distributed_type 'FSDP' with 2 processes.*{remedy}"
    with rollout(engine_of("transformers"), share=share) as rolling:
        training = trainer(policy(), rollout_func=rolling)
        training.accelerator = split
        with pytest.raises(InvalidRequest, match=refusal):
            rolling([PROMPTS[0]], training)
    with generation(engine_of("transformers"), share=share) as replaced:
        with pytest.raises(InvalidRequest, match=refusal):
            replaced(policy(), split, training.processing_class)
