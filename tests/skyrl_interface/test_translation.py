"""SkyRL's names and values, and what the engine is asked for: no engine is needed."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from PIL import Image

from drivetrain import ImageInput, InvalidRequest, TokenPrompt, VideoInput
from drivetrain_trainers.skyrl import InferenceEngineOutput, group_outputs_by_prompt
from drivetrain_trainers.skyrl.batch_calls import batch_call
from drivetrain_trainers.skyrl.sampling import payload_of, sampling_call

VLLM = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 0,
    "stop": None,
}
"""Parameters that SkyRL makes of its configuration for vLLM."""
SGLANG = {
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "max_new_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "return_logprob": True,
    "min_new_tokens": 1,
    "stop": None,
}
"""The same for SGLang, with its smallest number of tokens."""


def test_both_dialects_ask_for_the_same() -> None:
    expected = {
        "skip_special_tokens": True,
        "max_new_tokens": 8,
        "min_new_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "logprobs": 0,
    }
    assert sampling_call(VLLM).params == expected
    assert sampling_call(SGLANG).params == expected


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"max_generate_length": 5}, {"max_new_tokens": 5}),
        ({"sampling_seed": 7}, {"seed": 7}),
        ({"seed": 7}, {"seed": 7}),
        ({"stop": ["x"], "no_stop_trim": True}, {"stop": ["x"], "include_stop_str_in_output": True}),
        ({"stop": ["x"], "no_stop_trim": False}, {"stop": ["x"]}),
        ({"return_logprob": True, "top_logprobs_num": None}, {"logprobs": 0}),
        ({"return_logprob": False}, {}),
        ({"logprobs": 1}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        (
            {"json_schema": {"type": "object"}},
            {"structured_output": {"kind": "json_schema", "json_schema": '{"type": "object"}'}},
        ),
        ({"regex": "a+"}, {"structured_output": {"kind": "regex", "regex": "a+"}}),
        ({"ebnf": 'root ::= "a"'}, {"structured_output": {"kind": "ebnf", "ebnf": 'root ::= "a"'}}),
        ({"action_mask": [1, 2]}, {"logit_processors": [{"kind": "action_mask", "allowed_token_ids": [1, 2]}]}),
        ({"disallowed_tokens": [3]}, {"logit_processors": [{"kind": "disallowed_tokens", "token_ids": [3]}]}),
        (
            {"custom_logit_processor": "rl_action_mask:1,2", "custom_params": {}},
            {"logit_processors": [{"kind": "action_mask", "allowed_token_ids": [1, 2]}]},
        ),
        ({"logit_bias": {"5": 1.5}}, {"logit_bias": {5: 1.5}}),
        ({"return_hidden_states": True}, {"return_hidden_states": True}),
        ({"stop_regex": "a+", "stop_token_ids": [4]}, {"stop_regex": "a+", "stop_token_ids": [4]}),
        ({"unheard_of": 1}, {"unheard_of": 1}),  # for the engine to refuse
    ],
)
def test_parameters_are_translated(given: dict[str, object], asked: dict[str, object]) -> None:
    assert sampling_call(given).params == asked


def test_lora_and_priority_are_arguments_of_the_call_and_the_lower_priority_is_sooner() -> None:
    call = sampling_call({"lora_name": "one", "priority": 3})
    assert (call.lora, call.priority, call.params) == ("one", -3, {})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_tokens": 4, "max_new_tokens": 5}, "max_new_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"return_logprob": True, "top_logprobs_num": 3}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"custom_logit_processor": "gASV…"}, "custom_logit_processor"),
        ({"priority": "high"}, "priority"),
        ({"lora_name": 1}, "lora_name"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(given: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling_call(given)
    assert refused.value.field == field


def test_bodies_are_translated() -> None:
    body = {
        "prompt": "a",
        "session_id": "t1",
        "return_token_ids": True,
        "min_new_tokens": 2,
        "lora_name": "one",
        "top_k": -1,
    }
    assert payload_of(body) == {"prompt": "a", "min_tokens": 2, "lora": "one"}


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        ({}, "prompts"),
        ({"prompts": [[{"role": "user", "content": "a"}]], "prompt_token_ids": [[1]]}, "prompts"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, 2]}, "prompt_token_ids"),
        ({"prompts": [["a"]]}, "prompts"),
        ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "session_ids"),
        ({"prompt_token_ids": [[1]], "image_data": [None, None]}, "image_data"),
        ({"prompt_token_ids": [[1]], "video_data": [3]}, "video_data"),
        ({"prompt_token_ids": [[1]], "sampling_params": 3}, "sampling_params"),
        ({"prompt_token_ids": [[1]], "cache_salt": "s"}, "cache_salt"),
        ({"prompt_token_ids": [[1]], "mm_features": [{}]}, "mm_features"),
        ({"prompt_token_ids": [[1]], "return_routed_experts": True}, "return_routed_experts"),
    ],
)
def test_batches_that_cannot_be_honoured_are_refused_by_name(batch: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        batch_call(batch)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_absent_fields_may_be_none_or_false() -> None:
    batch = {"prompts": None, "prompt_token_ids": [[1]], "cache_salt": None, "return_routed_experts": False}
    assert batch_call(batch).prompts == (TokenPrompt(token_ids=(1,)),)  # type: ignore[arg-type]


def test_media_are_taken_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    image = Image.new("RGB", (2, 2), "red")
    image.save(file)
    data = file.read_bytes()
    forms = ["https://example.org/a.png", str(file), base64.b64encode(data).decode(), data, image]
    call = batch_call(
        {"prompt_token_ids": [[1], [2]], "image_data": [forms, None], "video_data": [None, "https://example.org/v.mp4"]}
    )
    assert call.prompts[0].media == (
        ImageInput(url="https://example.org/a.png"),
        ImageInput(path=str(file)),
        ImageInput(data=data),
        ImageInput(data=data),
        ImageInput.from_pil(image),
    )
    assert call.prompts[1].media == (VideoInput(url="https://example.org/v.mp4"),)


def test_outputs_of_several_samples_are_split_by_prompt() -> None:
    output = InferenceEngineOutput(
        responses=["a", "b", "c", "d"],
        response_ids=[[1], [2], [3], [4]],
        stop_reasons=["stop"] * 4,
        response_logprobs=[[0.1], [0.2], [0.3], [0.4]],
        weight_version="1",
        n_per_prompt=2,
        request_ids=["p0/0", "p0/1", "p1/0", "p1/1"],
        hidden_states=None,
    )
    first, second = group_outputs_by_prompt(output)
    assert (first["responses"], second["responses"]) == (["a", "b"], ["c", "d"])
    assert second["response_logprobs"] == [[0.3], [0.4]]
    assert second["request_ids"] == ["p1/0", "p1/1"]
    single = InferenceEngineOutput(**{**output, "n_per_prompt": None})
    assert group_outputs_by_prompt(single) == [single]
