"""Bad input raises a typed error that names field, value and remedy, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    BackendError,
    ChatPrompt,
    DrivetrainError,
    EngineStartError,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    UnknownBackend,
    UnsupportedCapability,
    create_engine,
)
from drivetrain.checks.simple_values import LONGEST_REQUEST_ID
from drivetrain.testing import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_template_variables_that_are_not_the_templates_are_refused(engine: InferenceEngine) -> None:
    prompt = ChatPrompt.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "template_kwargs": {"tools": []}}
    )
    with pytest.raises(InvalidRequest, match="tools"):
        await engine.generate(prompt)


async def test_the_longest_request_id_leaves_room_for_the_number_of_a_sample(engine: InferenceEngine) -> None:
    longest = "x" * LONGEST_REQUEST_ID
    output = await engine.generate(["a"], {"n": 2, "max_new_tokens": 1}, request_ids=[longest])
    for completion in output.completions:
        await engine.abort(completion.request_id)


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


async def test_every_architecture_option_is_known() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'qwen2'"):
        tiny_model("qwen22")
