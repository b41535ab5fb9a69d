"""Bad input raises a typed error that names field, value and remedy, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    BackendError,
    Capability,
    ChatPrompt,
    DrivetrainError,
    EngineStartError,
    EngineStateError,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    MemoryTag,
    SamplingParams,
    TokenPrompt,
    UnknownBackend,
    UnsupportedCapability,
    create_engine,
)
from drivetrain.checks.simple_values import LONGEST_REQUEST_ID
from drivetrain.testing import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "prompts is empty"),
    ("", r"prompts\[0\] is empty"),
    ([[]], r"prompts\[0\] is empty"),
    ([[1, 2], [3, 260]], r"prompts\[1\]: token id 260 is outside the vocabulary of 260"),
    ([[1, -2]], r"prompts\[0\]: -2 is no token id"),
    ([[1, 2.5]], r"prompts\[0\]: 2.5 is no token id"),
    ([[True, 1]], "True is no token id"),
    ([[1] * 1025], "1025 tokens, more than the context length of 1024"),
    ([[1] * 1024], "leaves room for 0"),
    (None, "NoneType"),
    ({"text": "x"}, "dict"),
    ([{"role": "user", "content": 3}], r"prompts.*content"),
    ([TokenPrompt(token_ids=(1,)).model_copy(update={"token_ids": (-5,)})], r"prompts\[0\]\.token_ids\.0=-5"),
    (TokenPrompt(token_ids=(1,)).model_copy(update={"token_ids": None}), r"token_ids=None"),
    (ChatPrompt.model_construct(messages=()), r"prompts\.messages=\(\)"),
]

BAD_PARAMS: list[tuple[Any, str]] = [
    # Copies check nothing.
    (SamplingParams().model_copy(update={"max_new_tokens": -3}), r"sampling_params.max_new_tokens=-3"),
    (SamplingParams().model_copy(update={"logit_processors": (5,)}), r"logit_processors\.0=5"),
    (SamplingParams().model_copy(update={"temprature": 5}), r"temprature: there is no such field"),
    ({"temperature": -1}, r"sampling_params.temperature=-1"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"max_new_tokens": -5}, "max_new_tokens=-5"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
    ({"max_new_tokens": 2000}, "ask for at most 1019"),
    ({"max_new_tokens": 2, "min_new_tokens": 5}, "min_new_tokens=5 is more than max_new_tokens=2"),
    ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"top_k": -1}, "top_k=-1"),
    ({"min_p": 2}, "min_p=2"),
    ({"n": 0}, "n=0"),
    ({"n": True}, "n=True"),
    ({"seed": -1}, "seed=-1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"logit_bias": {999: 1.0}}, "token id 999 is outside"),
    ({"stop_regex": "("}, "does not compile"),
    ({"stop": [3]}, "stop"),
    ({"max_tokens": 5}, "there is no such field; did you mean 'max_new_tokens'"),
    ({"logprobs_mode": "raw"}, "logprobs=0"),
    ({"logprobs": 0, "logprobs_mode": "cooked"}, "cooked"),
    ({"logprobs": 261}, "more than the vocabulary"),
    ({"include_stop_str_in_output": True}, "needs a stop string"),
    ("fast", "str"),
    ([{}, {}], "2 entries for 1 prompts"),
]


@pytest.mark.parametrize(("prompts", "says"), BAD_PROMPTS)
async def test_a_bad_prompt_is_refused(engine: InferenceEngine, prompts: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await engine.generate(prompts)
    with pytest.raises(InvalidRequest, match=says):
        await anext(engine.generate_stream(prompts))


@pytest.mark.parametrize(("params", "says"), BAD_PARAMS)
async def test_bad_sampling_params_are_refused(engine: InferenceEngine, params: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await engine.generate("hello", params)
    good = await engine.generate("hello", SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert len(good.completions[0].token_ids) == 1


async def test_one_bad_prompt_refuses_the_call_before_any_work(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts\[2\]"):
        await engine.generate(["fine", "fine too", ""])
    assert (await engine.stats()).running == 0


async def test_template_variables_that_are_not_the_templates_are_refused(engine: InferenceEngine) -> None:
    prompt = ChatPrompt.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "template_kwargs": {"tools": []}}
    )
    with pytest.raises(InvalidRequest, match="tools"):
        await engine.generate(prompt)


@pytest.mark.parametrize("request_id", ["", "\ud800", "a\0b", "x" * (LONGEST_REQUEST_ID + 1), 5, None, {}])
async def test_a_request_id_is_a_name(engine: InferenceEngine, request_id: Any) -> None:
    with pytest.raises(InvalidRequest, match="request_ids=") as caught:
        await engine.generate(["a"], request_ids=[request_id])
    assert caught.value.field == "request_ids"
    assert len(str(caught.value)) < 500


async def test_the_longest_request_id_leaves_room_for_the_number_of_a_sample(engine: InferenceEngine) -> None:
    longest = "x" * LONGEST_REQUEST_ID
    output = await engine.generate(["a"], {"n": 2, "max_new_tokens": 1}, request_ids=[longest])
    for completion in output.completions:
        await engine.abort(completion.request_id)


async def test_request_ids_must_differ(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="given twice"):
        await engine.generate(["a", "b"], request_ids=["x", "x"])
    with pytest.raises(InvalidRequest, match="1 entries for 2 prompts"):
        await engine.generate(["a", "b"], request_ids=["x"])


async def test_what_is_not_claimed_is_refused_by_name_before_any_work(engine: InferenceEngine) -> None:
    image = {"token_ids": (1,), "media": ({"url": "http://x/y.png"},)}
    calls: list[tuple[Capability, Any]] = [
        (Capability.ROUTED_EXPERTS, lambda: engine.generate("x", {"return_routed_experts": True})),
        (Capability.IMAGES, lambda: engine.generate(TokenPrompt.model_validate(image))),
        (Capability.HICACHE_STORAGE, lambda: engine.clear_hicache_storage()),
        (Capability.SLEEP_CUDA_GRAPH, lambda: engine.sleep([MemoryTag.CUDA_GRAPH])),
        (Capability.PROFILE, lambda: engine.start_profile("/tmp/x")),
    ]
    for capability, call in calls:
        assert capability not in engine.capabilities
        with pytest.raises(UnsupportedCapability, match=capability.value) as caught:
            await call()
        assert caught.value.capability == capability.value


async def test_unknown_memory_tags_are_refused(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="'weights', 'kv_cache', 'cuda_graph'"):
        await engine.sleep(["cache"])
    with pytest.raises(InvalidRequest, match="tags is empty"):
        await engine.sleep([])


BAD_CONFIGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": "/no/such/folder"}, InvalidConfig, "model='/no/such/folder': there is no such folder"),
    ({"model": " "}, InvalidConfig, "model is empty|model=' '"),
    ({"max_num_seq": 4}, InvalidConfig, "did you mean 'max_num_seqs'"),
    ({"max_num_seqs": 0}, InvalidConfig, "max_num_seqs=0"),
    ({"dtype": "int3"}, InvalidConfig, "dtype='int3'"),
    ({"tensor_parallel_size": 2}, UnsupportedCapability, "tensor_parallel"),
    ({"gpu_memory_utilization": 0.5}, InvalidConfig, "gpu_memory_utilization=0.5: the transformers backend has no"),
    ({"sleep_keeps_weights": True, "device": "cpu"}, UnsupportedCapability, "sleep_keeps_weights"),
    ({"isolation": "inline", "python": "/usr/bin/python3"}, InvalidConfig, "isolation='process'"),
    ({"isolation": "orbit"}, InvalidConfig, "isolation='orbit'"),
    ({"timeouts": {"start": -1}}, InvalidConfig, "timeouts.start=-1"),
]


@pytest.mark.parametrize(("fields", "error", "says"), BAD_CONFIGS)
async def test_a_bad_configuration_is_refused_before_anything_starts(
    fields: dict[str, Any], error: type[Exception], says: str, model: Path
) -> None:
    with pytest.raises(error, match=says):
        create_engine("transformers", **{"model": str(model), **fields})


async def test_an_unknown_backend_lists_the_known_ones(model: Path) -> None:
    with pytest.raises(UnknownBackend, match="transformers"):
        create_engine("transformer", model=str(model))
    assert issubclass(UnknownBackend, BackendError)
    assert issubclass(BackendError, DrivetrainError)


async def test_a_folder_without_a_model_is_a_typed_error(tmp_path: Path) -> None:
    engine = create_engine("transformers", model=str(tmp_path), isolation="inline")
    with pytest.raises(DrivetrainError, match="tokenizer"):
        await engine.start()
    assert engine.state.value == "failed"


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_more_context_than_the_model_has_is_refused_before_a_start(model: Path, isolation: str) -> None:
    with pytest.raises(InvalidConfig, match="more than the model's 1024") as caught:
        create_engine("transformers", model=str(model), isolation=isolation, context_length=5000)
    assert caught.value.field == "context_length"


async def test_an_argument_that_a_field_sets_is_refused_before_a_start(model: Path) -> None:
    with pytest.raises(InvalidConfig, match="engine_kwargs holds dtype") as caught:
        create_engine("transformers", model=str(model), engine_kwargs={"dtype": "float16"})
    assert caught.value.field == "engine_kwargs"


async def test_engine_kwargs_that_the_engine_does_not_know_are_a_typed_error(model: Path) -> None:
    engine = create_engine(
        "transformers", model=str(model), isolation="inline", engine_kwargs={"attn_implementation": "sorcery"}
    )
    with pytest.raises(EngineStartError, match="sorcery"):
        await engine.start()


async def test_an_engine_that_was_not_started_or_was_closed_says_so(model: Path) -> None:
    engine = create_engine("transformers", model=str(model), isolation="inline")
    assert Capability.SEED in engine.capabilities, "readable before launch"
    with pytest.raises(EngineStateError, match="created"):
        await engine.generate("x")
    async with engine:
        pass
    with pytest.raises(EngineStateError, match="closed"):
        await engine.generate("x")
    with pytest.raises(EngineStateError):
        await engine.start()


async def test_every_architecture_option_is_known() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'qwen2'"):
        tiny_model("qwen22")
