"""Calls that ``tool_choice`` demands: the schema of the output, and the calls read from its text."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.openai.engine_calls import chat_call
from drivetrain.openai.forced_calls import add_parts, calls_in, reader_of
from drivetrain.openai.payloads import ChatPayload, parse
from drivetrain.openai.responses import ToolCall
from drivetrain.types.sampling import JsonSchema

PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
ADD = {"type": "function", "function": {"name": "add"}}


def asked(choice: object, **fields: object) -> ChatPayload:
    messages = [{"role": "user", "content": "x"}]
    return parse(ChatPayload, {"messages": messages, "tools": TOOLS, "tool_choice": choice, **fields}, stream=False)


def schema(choice: object, **fields: object) -> Any:
    found = chat_call(asked(choice, **fields)).params.get("structured_output")
    assert isinstance(found, JsonSchema)
    return json.loads(found.json_schema)


def takes(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_required_demands_an_array_of_calls() -> None:
    found = schema("required")
    calls = [{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]
    assert takes(found, calls)
    for wrong in ([], [{"name": "add", "parameters": {"a": "1"}}], [{"name": "mul", "parameters": {}}], {"a": 1}):
        assert not takes(found, wrong), wrong


def test_references_stay_within_their_tool() -> None:
    value: dict[str, Any] = {"$ref": "#/$defs/Of%20a"}
    first: dict[str, Any] = {
        "type": "object",
        "properties": {"v": value, "next": {"$ref": "#"}},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"Of a": {"type": "integer"}},
    }
    second: dict[str, Any] = {
        "type": "object",
        "properties": {"v": value, "w": {"$ref": "#/properties/v"}},
        "$defs": {"Of a": {"type": "string"}},
    }
    literal = {"type": "object", "properties": {"enum": {"enum": ["#"]}, "default": {"$ref": "#/properties/enum"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in {"first": first, "se/cond~": second, "literal": literal}.items()
    ]
    found = schema("required", tools=tools)
    for name, right, wrong in (
        ("first", {"v": 1, "next": {"v": 2, "next": {"v": 3}}}, {"v": 1, "next": {"v": "2"}}),
        ("first", {"v": 1}, {"v": 1, "name": "first"}),
        ("se/cond~", {"v": "1", "w": "2"}, {"v": "1", "w": 2}),
        ("literal", {"enum": "#", "default": "#"}, {"default": "0"}),
    ):
        assert takes(found, [{"name": name, "parameters": right}]), name
        assert not takes(found, [{"name": name, "parameters": wrong}]), name


def test_without_parallel_calls_there_is_one_at_most() -> None:
    one = {"name": "now", "parameters": {}}
    assert takes(schema("required", parallel_tool_calls=True), [one, one])
    assert takes(schema("required", parallel_tool_calls=False), [one])
    assert not takes(schema("required", parallel_tool_calls=False), [one, one])


def test_a_named_function_demands_its_arguments() -> None:
    found = schema(ADD)
    assert takes(found, {"a": 1})
    assert not takes(found, {"a": "1"})
    assert schema({"function": {"name": "now"}}) == {"type": "object", "properties": {}}


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_other_choices_demand_nothing(choice: object) -> None:
    assert "structured_output" not in chat_call(asked(choice)).params
    assert reader_of(asked(choice)) is None


def test_response_format_is_that_of_content_which_a_call_has_none_of() -> None:
    assert schema("required", response_format={"type": "json_object"}) == schema("required")
    only = chat_call(asked("auto", response_format={"type": "json_object"})).params["structured_output"]
    assert only == JsonSchema(json_schema='{"type": "object"}')


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\{}[],: é\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='"\\{}ab'), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text(alphabet='add"\\é', min_size=1), VALUES),
    min_size=1,
    max_size=3,
)


@given(CALLS, st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_calls_are_read_however_the_text_comes(
    given: list[tuple[str, Any]], size: int, indent: int | None, ascii_only: bool
) -> None:
    wanted = [{"name": name, "parameters": parameters} for name, parameters in given]
    text = json.dumps(wanted, indent=indent, ensure_ascii=ascii_only)
    reader = reader_of(asked("required"))
    assert reader is not None
    calls: list[ToolCall] = []
    for at in range(0, len(text), size):
        add_parts(calls, reader.push(text[at : at + size]))
    read = [
        {"name": call["function"]["name"], "parameters": json.loads(call["function"]["arguments"])} for call in calls
    ]
    assert read == wanted
    assert reader.complete == len(calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert text_of(calls_in(text, new_reader())) == text_of(calls)


def new_reader() -> Any:
    return reader_of(asked("required"))


def text_of(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@given(st.text(alphabet='[{"name:parets} ,1\\', max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    for call in calls_in(text, new_reader()):
        assert call["function"]["arguments"]


@pytest.mark.parametrize("cut", ["1", "tru", '"a', "[[1]", '{"a": {}'])
def test_a_call_whose_value_was_cut_off_is_left_out(cut: str) -> None:
    assert calls_in(f'[{{"name": "now", "parameters": {cut}', new_reader()) == []


def test_a_call_that_was_cut_off_is_left_out() -> None:
    text = '[{"name": "now", "parameters": {}}, {"name": "add", "parameters": {"a": 1'
    assert text_of(calls_in(text, new_reader())) == [("now", "{}")]
    parts = new_reader().push(text)
    assert [(part["index"], part["function"]["arguments"]) for part in parts] == [(0, "{}"), (1, '{"a": 1')]


def test_all_text_is_the_arguments_of_a_named_function() -> None:
    reader = reader_of(asked(ADD))
    assert reader is not None
    parts = [part for piece in ("", " ", "\n{", '"a"', "") for part in reader.push(piece)]
    assert [part["function"] for part in parts] == [{"name": "add", "arguments": " \n{"}, {"arguments": '"a"'}]
    assert ["id" in part for part in parts] == [True, False]
    blank = reader_of(asked(ADD))
    assert blank is not None
    assert calls_in(" \n", blank) == []
