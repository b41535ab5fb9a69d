"""Public methods check the types of their arguments before any work, and name the argument."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from PIL import Image

from drivetrain import (
    BackendError,
    Capability,
    EngineState,
    ImageInput,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    PauseMode,
    SamplingParams,
    Timeouts,
    create_engine,
    load_backend,
)
from drivetrain.backend.registry import register, unregister
from drivetrain.checks.simple_values import LONGEST_NAME
from drivetrain.openai.payloads import ChatPayload, parse
from drivetrain.testing import tiny_model
from drivetrain.types.arguments import RULES, checked
from drivetrain.types.config import EngineConfig
from drivetrain.types.weights import DiskSource, WeightUpdateRequest


class Page:
    @checked
    async def load(self, lora_name: str, path: str | Path = "x", *, timeout: float | None = None) -> object:
        return lora_name, path, timeout

    @checked
    async def stream(self, *, lora: str | None = None) -> AsyncGenerator[object, None]:
        yield lora

    @checked
    async def pause(self, mode: PauseMode | str = PauseMode.WAIT) -> object:
        return mode

    @checked
    async def nested(self, value: object) -> object:
        raise RecursionError("maximum recursion depth exceeded")


BAD_NAMES: list[object] = [None, 5, "", [], {}, object, "\ud800", "a\0b", b"a", "x" * (LONGEST_NAME + 1)]
BAD_SECONDS: list[object] = ["5", True, 0, -1, float("nan"), float("inf"), 10**400, [], object]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_a_string_that_everything_can_hold(name: str) -> None:
    with pytest.raises(InvalidRequest, match="lora_name=") as caught:
        asyncio.run(Page().load(name))
    assert caught.value.field == "lora_name"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("seconds", BAD_SECONDS)
def test_a_timeout_is_finite_and_positive(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout="):
        asyncio.run(Page().load("a", timeout=seconds))


def test_what_helps_is_converted() -> None:
    assert asyncio.run(Page().load("a", Path("/b"), timeout=5)) == ("a", "/b", 5)
    assert asyncio.run(Page().pause("retract")) is PauseMode.RETRACT
    with pytest.raises(InvalidRequest, match="there is no such pause mode; expected one of 'abort'"):
        asyncio.run(Page().pause("stop"))


def test_a_stream_raises_when_it_is_read() -> None:
    stream = Page().stream(lora={})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="lora="):
        asyncio.run(anext(stream))


def test_nesting_too_deep_is_a_refusal_that_keeps_its_cause() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        asyncio.run(Page().nested(1))
    assert isinstance(caught.value.__cause__, RecursionError)


@pytest.mark.parametrize("backend", [5, None, [], b"transformers", object])
def test_an_engine_is_made_of_what_names_one(backend: object) -> None:
    with pytest.raises(InvalidConfig, match="backend="):
        create_engine(backend, model="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["~nobody-has-this-name/x", "/a\0b", "/" + "x" * 5000, "."])
def test_a_model_that_can_be_no_folder_is_refused(model: str, tmp_path: Path) -> None:
    if model == ".":
        (tmp_path / "file").write_text("")
        model = str(tmp_path / "file")
    with pytest.raises(InvalidConfig, match="model="):
        create_engine("transformers", model=model)


def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_bytes(b"backend: \xff\xfe")
    for bad in (path, "a\0.yaml", tmp_path):
        with pytest.raises(InvalidConfig, match="cannot read"):
            EngineConfig.from_yaml(bad)
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidConfig):
        EngineConfig.from_yaml(path)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [True, "0.5", b"1"])
def test_a_number_is_no_flag_and_no_text(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        SamplingParams.model_validate({field: value})
    with pytest.raises(ValueError, match="expected a number"):
        SamplingParams.model_validate({"logit_bias": {5: value}})


@pytest.mark.parametrize("field", Timeouts.model_fields)
@pytest.mark.parametrize("value", [0, -1, True, float("nan"), float("inf"), 10**10, "soon", [], None])
def test_a_deadline_is_finite(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=rf"timeouts\.{field}="):
        EngineConfig.from_mapping({"backend": "transformers", "model": "m", "timeouts": {field: value}})


def test_a_capability_goes_by_its_name_too(tmp_path: Path) -> None:
    engine: InferenceEngine = create_engine("transformers", model=str(tmp_path))
    assert engine.supports(Capability.STREAMING)
    assert engine.supports("streaming")
    junk: list[object] = ["stream", {}, None, 5, "x" * 5000]
    for unknown in junk:
        with pytest.raises(InvalidRequest, match="there is no such capability"):
            engine.supports(unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*BAD_NAMES, 5])
def test_a_backend_is_asked_for_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name="):
        load_backend(name)


def test_an_image_is_one_of_pil_that_can_be_read(tmp_path: Path) -> None:
    for junk in (None, 5, b"x", object()):
        with pytest.raises(InvalidRequest, match="image="):
            ImageInput.from_pil(junk)  # type: ignore[arg-type]
    path = tmp_path / "cut.png"
    Image.new("RGB", (64, 64), "red").save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with Image.open(path) as cut, pytest.raises(InvalidRequest, match="cannot be read"):
        ImageInput.from_pil(cut)


def nested(levels: int) -> object:
    value: object = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_regex": "(" * 5000},
        {"structured_output": {"kind": "regex", "regex": "(" * 5000}},
        {"structured_output": {"kind": "json_schema", "json_schema": "[" * 5000}},
        {"structured_output": {"kind": "json_schema", "json_schema": '{"a":' * 5000}},
    ],
)
def test_sampling_params_that_are_nested_too_deeply_are_refused_where_they_are_made(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams.model_validate(fields)


@pytest.mark.parametrize("field", ["logprobs_mode", "messages", "metadata", "tools", "structured_output"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_payload_that_is_nested_too_deeply_is_refused(field: str, stream: bool) -> None:
    payload = {"messages": [{"role": "user", "content": "x"}], field: nested(3000)}
    with pytest.raises(InvalidRequest):
        parse(ChatPayload, payload, stream=stream)


def test_a_model_whose_configuration_cannot_be_read_is_told_of_when_it_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert create_engine("transformers", model=str(tmp_path)).state is EngineState.CREATED


@pytest.mark.parametrize("architecture", [None, 5, [], {}, "qwen", "x" * 5000, nested(3000)])
def test_a_tiny_model_is_asked_for_by_name(architecture: str) -> None:
    with pytest.raises(InvalidConfig, match="architecture=") as caught:
        tiny_model(architecture)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("plugin", [None, 5, [], object(), nested(3000)])
def test_what_is_no_plugin_is_named(plugin: object) -> None:
    with pytest.raises(BackendError):
        register(plugin)
    with pytest.raises(BackendError, match="is not registered"):
        unregister(plugin)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", [Unprintable(), nested(3000), 5, {}])
def test_a_member_of_an_enum_goes_by_its_text(value: object) -> None:
    with pytest.raises(ValueError, match="expected a string"):
        SamplingParams.model_validate({"logprobs": 0, "logprobs_mode": value})
    for field in ("task", "isolation", "logprobs_mode"):
        with pytest.raises(InvalidConfig, match=f"{field}=.*expected a string"):
            EngineConfig.from_mapping({"backend": "transformers", "model": "m", field: value})


@pytest.mark.parametrize(
    ("part", "value"), [("mode", "later"), ("source", 5), ("plan", {}), ("digests", 5), ("lora", 5)]
)
def test_parts_of_an_update_that_was_copied_are_checked(part: str, value: object) -> None:
    request = WeightUpdateRequest(version="v", source=DiskSource(path="/nowhere"))
    assert RULES["request"]("request", request) is request
    with pytest.raises(InvalidRequest, match=f"{part}={value!r}: expected") as refusal:
        RULES["request"]("request", request.model_copy(update={part: value}))
    assert refusal.value.field == part
