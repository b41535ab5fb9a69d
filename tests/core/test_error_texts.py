"""Error messages name the remedy, never repeat a key, and stay short whatever the value."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from drivetrain import EngineConfig, InvalidConfig, InvalidRequest, SamplingParams, create_engine
from drivetrain.checks.name_hints import CONFIG_NAMES, PAYLOAD_NAMES, SAMPLING_NAMES, SAMPLING_VALUES
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import check_sampling_params
from drivetrain.errors import DrivetrainError, EngineStartError
from drivetrain.openai.payloads import ChatPayload, CompletionPayload, parse
from drivetrain.testing import tiny_model
from drivetrain.types.config import read_yaml

KEY = "sk-0123456789"


# Keys ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint_apikey": KEY},
        {"api_key": KEY},
        {"timeouts": {"api_key": KEY}},
        {"endpoint_api_key": [KEY]},
        {"endpoint": f"http://user:{KEY}@host"},
        {"engine_kwargs": {"api_key": {1, KEY}}},
    ],
)
def test_no_error_repeats_a_key(fields: dict[str, object]) -> None:
    config: dict[str, object] = {"backend": "transformers", "model": "m", **fields}
    with pytest.raises(InvalidConfig) as refusal:
        EngineConfig.from_mapping(config)
    assert KEY not in str(refusal.value)
    with pytest.raises(ValidationError) as raw:
        EngineConfig.model_validate(config)
    assert KEY not in str(raw.value)


def test_a_mistyped_key_names_the_field_that_is_meant() -> None:
    with pytest.raises(
        InvalidConfig, match=r"^endpoint_apikey: there is no such field; did you mean 'endpoint_api_key'"
    ):
        create_engine("transformers", model="m", endpoint_apikey=KEY)


def test_a_yaml_error_does_not_repeat_the_line(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f'backend: transformers\nendpoint_api_key: "{KEY}\n')
    with pytest.raises(InvalidConfig, match="line 3") as refusal:
        EngineConfig.from_yaml(file)
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize("twice", ["model: a\nmodel: b\n", "backend_options: {a: 1, a: 2}\n"])
def test_a_field_that_a_yaml_file_gives_twice_is_refused(tmp_path: Path, twice: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"backend: transformers\n{twice}")
    with pytest.raises(InvalidConfig, match=r"line [23]: '(model|a)' is given twice"):
        EngineConfig.from_yaml(file)


def test_a_yaml_file_may_merge_mappings(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("base: &base {a: 1, b: 2}\nouter: {inner: &inner {<<: *base, b: 3}}\nother: {<<: *inner, a: 4}\n")
    assert read_yaml(file)["outer"] == {"inner": {"a": 1, "b": 3}}


def test_a_number_and_its_text_are_two_keys_of_yaml(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("{ids: {1: a, '1': b}}")
    assert read_yaml(file)["ids"] == {1: "a", "1": "b"}


def test_a_configuration_shows_no_key() -> None:
    config = EngineConfig.from_mapping(
        {
            "backend": "transformers",
            "model": "m",
            "endpoint_api_key": KEY,
            "engine_kwargs": {"api_key": KEY, "hf_token": KEY, "inner": [{"password": KEY}], "max_tokens": 5},
        }
    )
    for text in (repr(config), str(config), str(config.described())):
        assert KEY not in text
        assert "max_tokens" in text
    assert config.engine_kwargs["api_key"] == KEY


def test_an_engines_own_error_is_shown_without_keys() -> None:
    given = {"hf_token": [KEY, "ab"], "inner": {"secret": {"of": KEY + "-9"}}, "trust": "plain-text"}
    config = EngineConfig(backend="vllm", model="m", endpoint_api_key=SecretStr(KEY[::-1]), engine_kwargs=given)
    said = f"hf_token: input_value=['{KEY}', 'ab'], {KEY}-9, {KEY[::-1]}, plain-text"
    assert config.redacted(said) == "hf_token: input_value=['**********', 'ab'], **********, **********, plain-text"


@pytest.mark.parametrize("kind", [ValueError, EngineStartError])
async def test_an_engine_that_does_not_start_repeats_no_key(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine("transformers", model=str(tiny_model("qwen2")), engine_kwargs={"hf_token": [KEY]})

    async def start(report: object) -> None:
        raise kind(f"hf_token.bool: input_value={engine.config.engine_kwargs['hf_token']}")

    monkeypatch.setattr(engine.parts.model, "start", start)
    with pytest.raises(EngineStartError, match=r"hf_token\.bool: input_value=\['\*+'\]") as caught:
        await engine.start()
    assert KEY not in "".join(traceback.format_exception(caught.value))
    assert KEY not in engine.status.describe()


# Length --------------------------------------------------------------------------------------------------------------

HUGE = "x" * 5_000_000


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": HUGE},
        {HUGE: 1},
        {"stop": [HUGE, 5]},
        {"stop_regex": "(" + HUGE[:50_000]},
        {"n": [1] * 1_000_000},
        {"structured_output": {"kind": "regex", "regex": "(" + HUGE[:50_000]}},
        {"structured_output": {"kind": HUGE}},
        {"logit_bias": {HUGE: 1.0}},
        {"seed": 10**4000},
    ],
)
def test_no_error_repeats_a_long_value(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_sampling_params(params)
    assert len(str(refusal.value)) < 3000
    assert len(refusal.value.field) < 300


@pytest.mark.parametrize("payload", [{"messages": HUGE}, {"messages": [{"role": "user", "content": HUGE}], HUGE: 1}])
def test_no_error_of_a_payload_repeats_a_long_value(payload: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(ChatPayload, payload, stream=False)
    assert len(str(refusal.value)) < 3000


def test_an_error_is_bounded_and_keeps_both_ends() -> None:
    text = str(DrivetrainError("begin" + HUGE + "end"))
    assert len(text) < 25_000
    assert text.startswith("begin")
    assert text.endswith("end")


def test_any_value_can_be_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    for value in (Broken(), 10**100_000, b"x" * 10_000_000, [[[[[[[[1]]]]]]]], {"a": {"b": HUGE}}, None):
        assert len(shown(value)) < 1000
    assert shown({"api_key": KEY, "n": 1}) == "{'api_key': '**********', 'n': 1}"
    assert shown("short") == "'short'"


# Names and values of other libraries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"max_tokens": 5}, "max_tokens", "did you mean 'max_new_tokens'?"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "did you mean 'max_new_tokens'?"),
        ({"min_tokens": 5}, "min_tokens", "did you mean 'min_new_tokens'?"),
        ({"num_return_sequences": 5}, "num_return_sequences", "did you mean 'n'?"),
        ({"do_sample": False}, "do_sample", "0 is greedy"),
        ({"stop_strings": ["a"]}, "stop_strings", "did you mean 'stop'?"),
        ({"json_schema": "{}"}, "json_schema", "structured_output=JsonSchema"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids", "ActionMask"),
        ({"bad_words": ["a"]}, "bad_words", "DisallowedTokens"),
        ({"top_k": -1}, "top_k", "top_k=-1: .*; 0 is off"),
        ({"top_p": 0}, "top_p", "1 is off"),
        ({"stop": None}, "stop", r"stop=None: .*; leave it out for the default, \(\)"),
        ({"stop_token_ids": None}, "stop_token_ids", r"leave it out for the default, \(\)"),
        ({"logit_bias": None}, "logit_bias", "leave it out for the default, {}"),
        ({"temperature": None}, "temperature", "leave it out for the default, 1.0"),
        ({"n": None}, "n", "leave it out for the default, 1"),
        ({"max_new_tokens": -1}, "max_new_tokens", "None goes on up to the context length"),
        ({"logprobs": True}, "logprobs", "0 is for the sampled tokens"),
        ({"seed": -1}, "seed", "leave it out"),
        ({"skip_special_tokens": None}, "skip_special_tokens", "leave it out for the default, True"),
    ],
)
def test_what_other_libraries_say_is_refused_with_what_is_meant(
    params: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        check_sampling_params(params)
    assert refusal.value.field == f"sampling_params.{field}"


def test_other_names_are_none_of_ours_and_lead_to_ours() -> None:
    tables = ((SamplingParams, SAMPLING_NAMES), (EngineConfig, CONFIG_NAMES))
    of_a_chat = {name: hint for name, hint in PAYLOAD_NAMES.items() if name != "max_completion_tokens"}
    payloads = ((ChatPayload, of_a_chat), (CompletionPayload, PAYLOAD_NAMES))
    for model, names in (*tables, *payloads):
        assert not names.keys() & model.model_fields.keys()
        meant = [hint.split("'")[1] for hint in names.values() if hint.startswith("did you mean")]
        assert set(meant) <= model.model_fields.keys()
    for name in ("max_completion_tokens", "max_new_tokens"):
        with pytest.raises(InvalidRequest, match=f"{name}: there is no such field; did you mean 'max_tokens'"):
            parse(CompletionPayload, {"prompt": "a", name: 5}, stream=False)
    for field, value in SAMPLING_VALUES:
        with pytest.raises(InvalidRequest):
            check_sampling_params({field: value})
