"""Payloads of the OpenAI API: their translation, refusals, answers and errors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from drivetrain import (
    AudioInput,
    Backend,
    Capability,
    ChatPrompt,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ImageInput,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    Isolation,
    JsonSchema,
    Message,
    ModelInfo,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenPrompt,
    UnsupportedCapability,
    VersionSpan,
    VideoInput,
)
from drivetrain.backend.base import EngineStats
from drivetrain.errors import DrivetrainError, NonFiniteLogits, error_classes
from drivetrain.openai import ChatPayload, CompletionPayload, ParsedText, error_body, parse_tool_calls
from drivetrain.openai.choices import chat_logprobs, completion_logprobs
from drivetrain.openai.engine_calls import Call, chat_call, completion_call
from drivetrain.openai.messages import to_template
from drivetrain.openai.payloads import parse
from drivetrain.openai.responses import FinishReasonName
from drivetrain.openai.token_texts import TextOffsets, TokenTexts
from drivetrain.testing import byte_tokenizer, tiny_model
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.tool_calls import Dialect, dialects_for
from drivetrain.tool_calls.json_calls import NamedWithin

Payload = dict[str, Any]

CHAT: Payload = {"messages": [{"role": "user", "content": "x"}], "request_id": "r"}
TEXT: Payload = {"prompt": "x", "request_id": "r"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def named(function: str) -> Payload:
    return {"type": "function", "function": {"name": function}}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def chat(payload: Payload) -> Call:
    return chat_call(parse(ChatPayload, payload, stream=bool(payload.get("stream"))))


def completion(payload: Payload) -> Call:
    return completion_call(parse(CompletionPayload, payload, stream=bool(payload.get("stream"))))


# Translation ---------------------------------------------------------------------------------------------------------

# Fields of both requests → a value, and its translation.
PARAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "n": (3, {"n": 3}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.5, {"top_p": 0.5}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "logit_bias": ({"7": -100, "8": 1.5}, {"logit_bias": {7: -100.0, 8: 1.5}}),
    "seed": (5, {"seed": 5}),
    "stop": ("a", {"stop": ("a",)}),
    "max_tokens": (5, {"max_new_tokens": 5}),
    "top_k": (5, {"top_k": 5}),
    "min_p": (0.5, {"min_p": 0.5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "min_tokens": (2, {"min_new_tokens": 2}),
    "stop_token_ids": ([5, 6], {"stop_token_ids": (5, 6)}),
    "stop_regex": (["a", "b"], {"stop_regex": ("a", "b")}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "structured_output": ({"kind": "regex", "regex": "a"}, {"structured_output": {"kind": "regex", "regex": "a"}}),
    "response_format": (SCHEMA, {"structured_output": JsonSchema(json_schema='{"type": "integer"}')}),
    "logit_processors": (
        [{"kind": "disallowed_tokens", "token_ids": [3]}],
        {"logit_processors": [{"kind": "disallowed_tokens", "token_ids": (3,)}]},
    ),
}
LABELS = {"model", "user", "metadata", "stream", "stream_options", "request_id"}
CALL = {"lora": "adapter", "priority": 2}
# Fields that are valid only together with another one.
PAIRS: dict[str, tuple[Payload, dict[str, Any]]] = {
    "include_stop_str_in_output": (
        {"include_stop_str_in_output": True, "stop": "a"},
        {"include_stop_str_in_output": True, "stop": ("a",)},
    ),
}
CHAT_PARAMS: dict[str, tuple[Payload, dict[str, Any]]] = {
    "max_completion_tokens": ({"max_completion_tokens": 6}, {"max_new_tokens": 6}),
    "logprobs": ({"logprobs": True}, {"logprobs": 0}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    "logprobs_mode": ({"logprobs": True, "logprobs_mode": "raw"}, {"logprobs": 0, "logprobs_mode": "raw"}),
}
TEXT_PARAMS: dict[str, tuple[Payload, dict[str, Any]]] = {
    "logprobs": ({"logprobs": 4}, {"logprobs": 4}),
    "logprobs_mode": ({"logprobs": 0, "logprobs_mode": "raw"}, {"logprobs": 0, "logprobs_mode": "raw"}),
    "echo": ({"echo": True, "logprobs": 1}, {"logprobs": 1, "prompt_logprobs": 1, "logprobs_mode": "raw"}),
}
CHAT_PROMPT: dict[str, tuple[Any, dict[str, Any]]] = {
    "messages": ([{"role": "system", "content": "s"}], {"messages": [Message(role="system", content="s")]}),
    "tools": ([TOOL], {"tools": [TOOL]}),
    "chat_template_kwargs": ({"thinking": False}, {"template_kwargs": {"thinking": False}}),
    "add_generation_prompt": (False, {"add_generation_prompt": False}),
    "continue_final_message": (True, {"continue_final_message": True}),
}
NEUTRAL = {"modalities": ["text"], "parallel_tool_calls": True, "service_tier": "auto", "store": False}


def test_every_field_of_both_requests_is_accounted_for() -> None:
    both = {*PARAMS, *LABELS, *CALL, *PAIRS}
    assert both | {*CHAT_PARAMS, *CHAT_PROMPT, *NEUTRAL, "tool_choice", "safety_identifier"} == set(
        ChatPayload.model_fields
    )
    assert both | {*TEXT_PARAMS, "prompt", "add_special_tokens"} == set(CompletionPayload.model_fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({name: value}, expected) for name, (value, expected) in PARAMS.items()]
    + [*PAIRS.values(), *CHAT_PARAMS.values()],
    ids=[*PARAMS, *PAIRS, *CHAT_PARAMS],
)
def test_a_field_of_a_chat_request_reaches_the_params(fields: Payload, expected: dict[str, Any]) -> None:
    assert SamplingParams.model_validate(chat({**CHAT, **fields}).params) == SamplingParams.model_validate(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({name: value}, expected) for name, (value, expected) in PARAMS.items()]
    + [*PAIRS.values(), *TEXT_PARAMS.values()],
    ids=[*PARAMS, *PAIRS, *TEXT_PARAMS],
)
def test_a_field_of_a_completion_request_reaches_the_params(fields: Payload, expected: dict[str, Any]) -> None:
    params = SamplingParams.model_validate({"max_new_tokens": 16, **expected})
    assert SamplingParams.model_validate(completion({**TEXT, **fields}).params) == params


@pytest.mark.parametrize("name", CHAT_PROMPT)
def test_a_field_of_a_chat_request_reaches_the_prompt(name: str) -> None:
    value, expected = CHAT_PROMPT[name]
    fields = {"messages": [Message(role="user", content="x")], **expected}
    assert chat({**CHAT, name: value}).prompts == (ChatPrompt.model_validate(fields),)


def test_adapter_priority_and_id_reach_the_call() -> None:
    call = chat({**CHAT, **CALL})
    assert (call.lora, call.priority, call.id, call.request_ids) == ("adapter", 2, "r", ["r"])
    assert completion({**TEXT, "prompt": ["a", "b"]}).request_ids == ["r-0", "r-1"]
    assert chat({"messages": CHAT["messages"]}).id.startswith("chatcmpl-")


def test_labels_and_what_is_so_anyway_change_nothing() -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "stream": False, "tool_choice": "none"}
    assert chat({**CHAT, **NEUTRAL, **labels}) == chat(CHAT)
    assert chat({**CHAT, "tools": [TOOL], "tool_choice": "none"}) == chat(CHAT)


def test_null_stands_for_an_absent_field() -> None:
    assert chat({**CHAT, **dict.fromkeys(set(ChatPayload.model_fields) - set(CHAT))}) == chat(CHAT)
    assert completion({**TEXT, **dict.fromkeys(set(CompletionPayload.model_fields) - set(TEXT)), "best_of": None}) == (
        completion(TEXT)
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [TokenPrompt(token_ids=(1, 2))]),
        ([[1], [2, 3]], [TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2, 3))]),
        (["a", [1]], [TextPrompt(text="a"), TokenPrompt(token_ids=(1,))]),
    ],
)
def test_a_prompt_is_text_or_ids_alone_or_in_a_list(given: object, expected: list[TextPrompt | TokenPrompt]) -> None:
    assert completion({"prompt": given}).prompts == tuple(expected)
    plain = completion({"prompt": given, "add_special_tokens": False}).prompts
    assert all(not prompt.add_special_tokens for prompt in plain if isinstance(prompt, TextPrompt))


def test_response_formats() -> None:
    assert "structured_output" not in chat({**CHAT, "response_format": {"type": "text"}}).params
    call = chat({**CHAT, "response_format": {"type": "json_object"}})
    assert call.params["structured_output"] == JsonSchema(json_schema='{"type": "object"}')


# Messages ------------------------------------------------------------------------------------------------------------


def read(content: Any, **fields: Any) -> tuple[Message, tuple[Any, ...]]:
    (message,), media = to_template((Message(role="user", content=content, **fields),))
    return message, media


def test_text_in_parts_becomes_one_text() -> None:
    message, media = read([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert (message.content, media) == ("a\nb", ())
    assert read("plain", name="someone")[0] == Message.model_validate(
        {"role": "user", "content": "plain", "name": "someone"}
    )


def test_null_content_becomes_an_empty_text() -> None:
    assert read(None)[0].content == ""
    (absent,), _ = to_template((Message(role="assistant"),))
    assert absent.content == ""


def test_media_leave_their_place_and_go_beside_the_prompt() -> None:
    message, media = read(
        [
            {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": "auto"}},
            {"type": "text", "text": "a"},
            {"type": "video_url", "video_url": {"url": "https://host/b.mp4"}},
            {"type": "input_audio", "input_audio": {"data": "c291bmQ=", "format": "wav"}},
        ]
    )
    assert message.content == [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "video"}, {"type": "audio"}]
    assert media == (
        ImageInput(url="https://host/a.png"),
        VideoInput(url="https://host/b.mp4"),
        AudioInput(data=b"sound"),
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "text", "text": 5},
        {"type": "text", "text": "a", "cache": True},
        {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": "high"}},
        {"type": "input_audio", "input_audio": {"data": "?"}},
        {"type": "file", "file": {}},
        {},
    ],
)
def test_a_part_that_cannot_be_honoured_is_refused_with_its_place(part: Payload) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read([{"type": "text", "text": "a"}, part])
    assert refusal.value.field.startswith("messages.0.content.1")


def test_arguments_of_earlier_tool_calls_are_objects_to_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message, _ = read(None, tool_calls=[call])
    assert message.model_extra == {
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    }
    with pytest.raises(InvalidRequest, match="is no JSON") as refusal:
        read(None, tool_calls=[{"function": {"name": "add", "arguments": "{"}}])
    for nothing in ("", " ", None):
        message, _ = read(None, tool_calls=[{"function": {"name": "add", "arguments": nothing}}])
        assert message.model_extra == {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    for bad in ('{"a": NaN}', '{"a": 1e400}', "[" * 100_000):
        with pytest.raises(InvalidRequest, match="is no JSON"):
            read(None, tool_calls=[{"function": {"name": "add", "arguments": bad}}])
    assert refusal.value.field == "messages.0.tool_calls.0.function.arguments"


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "field", "words"),
    [
        ({**CHAT, "temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({**CHAT, "temprature": None}, "temprature", "no such field"),
        ({**CHAT, "functions": []}, "functions", "use tools"),
        ({**CHAT, "n": "3"}, "n", "valid integer"),
        ({**CHAT, "messages": [{"role": "user", "content": 3}]}, "messages.0.content", "valid string"),
        ({**CHAT, "messages": [{"content": "x"}]}, "messages.0.role", "is missing"),
        ({**CHAT, "logit_bias": {"7": 1, "07": 2}}, "logit_bias", "twice"),
        ({}, "messages", "is missing"),
        ({**CHAT, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({**CHAT, "stream": True}, "stream", "_stream"),
        ({**CHAT, "stream_options": {}}, "stream_options", "only for a stream"),
        ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "max_tokens=3"),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs", "logprobs=True"),
        ({**CHAT, "tool_choice": "auto"}, "tool_choice", "no tools"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({**CHAT, "tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'auto', 'none' or 'required'"),
        ({**CHAT, "tools": [TOOL], "tool_choice": named("mul")}, "tool_choice", "'mul' is none of tools, which are"),
        ({**CHAT, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        (
            {**CHAT, "tools": [TOOL], "tool_choice": {"function": {"name": "add", "x": 1}}},
            "tool_choice.function.x",
            "known fields: name",
        ),
        (
            {
                **CHAT,
                "tools": [TOOL],
                "tool_choice": "required",
                "structured_output": {"kind": "regex", "regex": "a"},
            },
            "tool_choice",
            "leave one of them out",
        ),
        (
            {
                **CHAT,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools",
            "leads back to itself",
        ),
        (
            {
                **CHAT,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/properties/x"}}}],
                "tool_choice": "required",
            },
            "tools",
            "leads to nothing in the schema",
        ),
        (
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            "response_format",
            "leads back to itself",
        ),
        ({**CHAT, "tools": [{**TOOL, "type": "web"}]}, "tools.0", "expected"),
        ({**CHAT, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0", "strict"),
        ({**CHAT, "store": True}, "store", "False"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format", "both or neither"),
        (
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "x": 1}}},
            "response_format.json_schema.x",
            "known fields: name, schema, strict",
        ),
        (
            {**CHAT, "response_format": SCHEMA, "structured_output": {"kind": "regex", "regex": "a"}},
            "response_format",
            "one of them",
        ),
    ],
)
def test_a_refusal_names_the_field(payload: Payload, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat_call(parse(ChatPayload, payload, stream=False))
    assert refusal.value.field == field
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "logprobs_mode": "temperature"}, "logprobs_mode"),
    ],
)
def test_a_refusal_of_a_completion_names_the_field(payload: Payload, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(payload)
    assert refusal.value.field == field


def test_a_payload_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is a list; expected a mapping"):
        parse(ChatPayload, [], stream=False)


@pytest.mark.parametrize(
    ("error", "expected", "field"),
    [
        (InvalidRequest("sampling_params.top_p=2: no", field="sampling_params.top_p"), "top_p=2: no", "top_p"),
        (
            InvalidRequest("sampling_params: min_new_tokens=5 is more than max_new_tokens=3", field="sampling_params"),
            "min_tokens=5 is more than max_completion_tokens=3",
            "",
        ),
        (InvalidRequest("prompts[0] is empty", field="prompts[0]"), "messages is empty", "messages"),
        (InvalidRequest("no chat template", field="prompts"), "no chat template", "messages"),
    ],
)
def test_the_engines_refusals_speak_of_the_requests_fields(error: InvalidRequest, expected: str, field: str) -> None:
    call = chat(CHAT)
    with pytest.raises(InvalidRequest) as refusal, call.refusals():
        raise error
    assert (str(refusal.value), refusal.value.field) == (expected, field)


def test_one_of_several_prompts_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequest) as refusal, completion({"prompt": ["a", "b"]}).refusals():
        raise InvalidRequest("prompts[1] is empty", field="prompts[1]")
    assert (str(refusal.value), refusal.value.field) == ("prompt[1] is empty", "prompt[1]")


def test_every_error_has_a_status_and_openais_body() -> None:
    statuses = {}
    for cls in error_classes(DrivetrainError):
        status, body = error_body(cls("what went wrong"))
        assert json.loads(json.dumps(body)) == body
        assert set(body) == {"error"}
        assert body["error"]["message"] == "what went wrong"
        statuses[cls.__name__] = status
    assert statuses["InvalidRequest"] == statuses["UnsupportedCapability"] == 400
    assert statuses["EngineStateError"] == 503
    assert statuses["DeadlineExceeded"] == 504
    assert all(400 <= status < 600 for status in statuses.values())
    assert error_body(InvalidRequest("m", field="model"))[0] == 404
    assert error_body(InvalidRequest("m", field="top_p"))[1]["error"]["param"] == "top_p"
    assert error_body(UnsupportedCapability("m"))[1]["error"]["code"] == "unsupported_capability"


# Texts of tokens -----------------------------------------------------------------------------------------------------

BYTES = Tokenizer(byte_tokenizer())


@given(st.text(max_size=20))
def test_bytes_of_tokens_put_together_are_the_text(text: str) -> None:
    written = [TokenTexts(BYTES)(token_id) for token_id in text.encode()]
    assert b"".join(bytes(token.data or ()) for token in written).decode() == text


@given(st.text(max_size=20))
def test_offsets_say_where_each_token_begins(text: str) -> None:
    ids = list(text.encode())
    pushed = TextOffsets(BYTES, skip_special_tokens=True, start=5)
    offsets = pushed.push(ids[:3]) + pushed.push(ids[3:])
    starts = [5 + index for index, character in enumerate(text) for _ in character.encode()]
    assert offsets == starts


def test_no_two_tokens_are_written_alike() -> None:
    written = [TokenTexts(BYTES)(token_id).text for token_id in range(260)]
    assert len(set(written)) == 260
    assert written[0xE2] == "bytes:\\xe2"
    assert written[258] == "<|im_end|>"


def test_sentencepiece_spaces_and_bytes_are_not_lost() -> None:
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "▁Hi": 3, "▁": 4, "ya": 5}
    inner = InnerTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")))
    assert [texts(token_id).text for token_id in (3, 4, 5)] == [" Hi", " ", "ya"]
    assert (texts(1).text, texts(1).data) == ("bytes:\\xe2", [0xE2])


# Tool calls ----------------------------------------------------------------------------------------------------------

TOOLS: list[Payload] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}},
            },
        },
    }
    for name in ("add", "tools.sub")
]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', None, [("add", {"a": 1})]),
        (
            'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
            '<tool_call>{"name": "tools.sub", "arguments": {}}</tool_call>',
            "I add.",
            [("add", {"a": 1}), ("tools.sub", {})],
        ),
        ('<tool_call>{"name": "add", "arguments": {"s": "</tool_call>"}}', None, [("add", {"s": "</tool_call>"})]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', None, [("add", {"a": 1})]),
        ('{"name": "add", "parameters": {"a": 1}}', None, [("add", {"a": 1})]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', None, [("add", {"a": 1})]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', None, [("add", {"a": 1})]),
        ('[{"name": "add"}, {"name": "add", "arguments": {"a": 2}}]', None, [("add", {}), ("add", {"a": 2})]),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n12\n</parameter>\n"
            "</function>\n</tool_call>",
            None,
            [("add", {"a": 1, "s": "12"})],
        ),
        (
            "<function=add><parameter=o>{}</parameter><parameter=a>one</parameter></function>!",
            "!",
            [("add", {"o": {}, "a": "one"})],
        ),
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            None,
            [("add", {"a": 1})],
        ),
        ("<tool_call>add</tool_call>", None, [("add", {})]),
        ('<function=add>{"a": 1}</function>', None, [("add", {"a": 1})]),
        ("[add(a=1, s='x'), tools.sub()]", None, [("add", {"a": 1, "s": "x"}), ("tools.sub", {})]),
        (r"add(s='\d\ud800')", None, [("add", {"s": "\\d\ud800"})]),
        ("add(a=-1, o={'k': [None, True]})", None, [("add", {"a": -1, "o": {"k": [None, True]}})]),
    ],
)
def test_calls_are_read_in_each_syntax(text: str, content: str | None, calls: list[tuple[str, object]]) -> None:
    parsed = parse_tool_calls(text, TOOLS)
    assert parsed.content == content
    assert [(call["name"], json.loads(call["arguments"])) for call in parsed.calls] == calls


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "mul", "arguments": {}}</tool_call>',
        '{"name": "mul", "arguments": {}}',
        "[mul(a=1)]",
        "<function=mul>{}</function>",
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<function=add>{"a": 1',
        "add(1)",
        "add(a=open('file'))",
        "add(a=1) and more",
        '{"name": "add"} and more',
        "<tool_call>" * 50,
        "[" * 100_000,
        "(" * 1000 + "add()",
        "add(" + "[" * 5000 + ")",
        "no call at all ",
        "<tool_call>add" + " " * 50_000,
        "<tool_call>add<arg_key>" + " " * 50_000,
        "<function=add><parameter=a>" * 1000,
        "<tool_call>add<arg_key>a</arg_key><arg_value>" * 1000,
        "x<think>" * 50_000,
        'functools[<parameter name="a">' * 20_000,
        "add(" + ") " * 20_000 + "x",
    ],
)
def test_what_is_no_call_to_a_known_function_stays_content(text: str) -> None:
    assert parse_tool_calls(text, TOOLS) == ParsedText(text, ())


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMAS: dict[str, Any] = {
    "$defs": {
        "Size": {"enum": ["1", "2"]},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
    },
    "properties": {
        "text": {"type": "string"},
        "optional": OPTIONAL,
        "types": {"type": ["string", "null"]},
        "nullable": {"type": "string", "nullable": True},
        "size": {"$ref": "#/$defs/Size"},
        "maybe": {"$ref": "#/$defs/Maybe"},
        "const": {"const": 5},
        "enum": {"enum": [1, "1", None, True]},
        "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        "all": {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "boolean"]}]},
        "described": {"allOf": [{"$ref": "#/$defs/Size"}], "description": "a size"},
        "count": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "both": {"type": ["integer", "null"]},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "node": {"$ref": "#/$defs/Node"},
        "loop": {"$ref": "#/$defs/Loop"},
        "gone": {"$ref": "#/$defs/Gone"},
        "remote": {"$ref": "https://example.com/schema"},
        "any": {},
        "listed": {"items": {"type": "string"}},
        "python": {"type": "int"},
    },
    "additionalProperties": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "90210", "90210"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "None", "None"),
        ("text", "1e400", "1e400"),
        ("optional", "90210", "90210"),
        ("optional", "true", "true"),
        ("optional", "null", None),
        ("optional", "None", None),
        ("optional", '"quoted"', '"quoted"'),
        ("types", "90210", "90210"),
        ("types", "null", None),
        ("nullable", "1.5", "1.5"),
        ("nullable", "null", None),
        ("size", "1", "1"),
        ("maybe", "2", "2"),
        ("maybe", "null", None),
        ("const", "5", 5),
        ("enum", "1", "1"),
        ("enum", "true", True),
        ("enum", "None", None),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("either", "1e400", "1e400"),
        ("all", "5", "5"),
        ("all", "true", "true"),
        ("described", "1", "1"),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "one", "one"),
        ("number", "5", 5),
        ("number", "-0.5e1", -5.0),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "1", "1"),
        ("both", "None", None),
        ("both", "7", 7),
        ("list", '["a", 1]', ["a", 1]),
        ("list", "['a', True, null]", ["a", True, None]),
        ("list", "('a',)", ["a"]),
        ("object", "{'a': 1}", {"a": 1}),
        ("object", "{'a': 1e400}", "{'a': 1e400}"),
        ("object", "{'a': f()}", "{'a': f()}"),
        ("node", '{"next": {}}', {"next": {}}),
        ("loop", "5", 5),
        ("gone", "5", 5),
        ("remote", "[1]", [1]),
        ("any", "90210", 90210),
        ("any", "hello", "hello"),
        ("listed", '["a"]', ["a"]),
        ("python", "5", 5),
        ("unknown", "5", 5),
    ],
)
@pytest.mark.parametrize("syntax", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"])
def test_the_schema_decides_what_a_text_stands_for(name: str, text: str, value: object, syntax: str) -> None:
    tools: list[Payload] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS}}]
    written = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n'
        f'<parameter name="{name}">{text}</parameter>\n</invoke>\n</minimax:tool_call>',
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        f'<｜DSML｜parameter name="{name}" string="false">{text}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    }
    parsed = parse_tool_calls(written[syntax], tools, dialects=dialects_for(syntax, None))
    assert [json.loads(call["arguments"]) for call in parsed.calls] == [{name: value}]
    assert type(json.loads(parsed.calls[0]["arguments"])[name]) is type(value)
    assert parsed.content is None


@pytest.mark.parametrize("text", ["1e400", "NaN", "-Infinity", "inf", "-1E999"])
def test_a_number_that_json_has_not_makes_no_call(text: str) -> None:
    tools: list[Payload] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS}}]
    for written in (
        f"<function=f><parameter=number>{text}</parameter></function>",
        f'<tool_call>{{"name": "f", "arguments": {{"number": {text}}}}}</tool_call>',
        f'[TOOL_CALLS]f[ARGS]{{"number": {text}}}',
    ):
        assert parse_tool_calls(written, tools) == ParsedText(written, ())


ADD = [("add", {"a": 1})]
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', ADD),
        ("mistral", '[TOOL_CALLS]add{"a": 1}', ADD),
        (
            "mistral",
            '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}[TOOL_CALLS]tools.sub[ARGS]{}',
            [*ADD, ("tools.sub", {})],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', ADD),
        ("deepseek_v3", DEEPSEEK.format('function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'), ADD),
        ("deepseek_v31", DEEPSEEK.format('add<｜tool▁sep｜>{"a": 1}'), ADD),
        ("deepseek_v32", '<｜DSML｜invoke name="tools.sub"/>', [("tools.sub", {})]),
        ("deepseek_v32", '<｜DSML｜invoke name="add">\n{"a": 1}\n</｜DSML｜invoke>', ADD),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>'
            "</｜DSML｜invoke>",
            [("add", {"a": "1"})],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            ADD,
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            ADD,
        ),
        ("step3", '<steptml:invoke name="add"><steptml:parameter name="a">1</steptml:parameter></steptml:invoke>', ADD),
        ("seed_oss", "<seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>", ADD),
        ("hunyuan", "<tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", ADD),
        ("lfm2", "<|tool_call_start|>[add(a=1)]<|tool_call_end|>", ADD),
        (
            "lfm2",
            "<|tool_call_start|>[add(s='<|tool_call_end|>')]<|tool_call_end|>",
            [("add", {"s": "<|tool_call_end|>"})],
        ),
        ("olmo3", "<function_calls>add(a=1)\ntools.sub()</function_calls>", [*ADD, ("tools.sub", {})]),
        ("llama4_pythonic", "<|python_start|>[add(a=1)]<|python_end|>", ADD),
        ("pythonic", "[add(a=1), tools.sub(o={'k': null})]", [*ADD, ("tools.sub", {"o": {"k": None}})]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "tools.sub"}', [*ADD, ("tools.sub", {})]),
        ("longcat", '<longcat_tool_call>{"name": "add", "arguments": {"a": 1}}</longcat_tool_call>', ADD),
        ("internlm", '<|action_start|> <|plugin|>\n{"name": "add", "parameters": {"a": 1}}<|action_end|>', ADD),
        ("granite", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', ADD),
        ("phi4_mini_json", 'functools[{"name": "add", "arguments": {"a": 1}}]', ADD),
        ("jamba", '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>', ADD),
        ("hermes", '<tool_call>{"name": "tools.sub", "arguments": null}</tool_call>', [("tools.sub", {})]),
        ("hermes", '<tool_call>{"name": "tools.sub", "arguments": " "}</tool_call>', [("tools.sub", {})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', ADD),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>", ADD),
        ("qwen3_coder", '<function=add>{"a": 1}', ADD),
        (
            "qwen3_coder",
            "<function=add><parameter=s>a </parameter> b</parameter><parameter=a>1</parameter></function>",
            [("add", {"s": "a </parameter> b", "a": 1})],
        ),
        (
            "glm45",
            "<tool_call>add<arg_key>s</arg_key><arg_value></arg_value>.</arg_value></tool_call>",
            [("add", {"s": "</arg_value>."})],
        ),
    ],
)
def test_a_syntax_is_read_by_its_name_and_by_any(parser: str, text: str, calls: list[tuple[str, object]]) -> None:
    for dialects in (dialects_for(parser, None), dialects_for(None, None)):
        parsed = parse_tool_calls(text, TOOLS, dialects=dialects)
        assert [(call["name"], json.loads(call["arguments"])) for call in parsed.calls] == calls


def test_a_named_syntax_is_the_only_one() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse_tool_calls(text, TOOLS, dialects=dialects_for("mistral", "<tool_call>")) == ParsedText(text, ())
    with pytest.raises(InvalidConfig, match=r"known: .*hermes") as refusal:
        EngineConfig.from_mapping({"backend": "b", "model": "m", "tool_call_parser": "esperanto"})
    assert refusal.value.field == "tool_call_parser"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ('{{ "<tool_call>\n" + call | tojson + "\n</tool_call>" }}', "hermes"),
        ("<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("[TOOL_CALLS] [", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|tool_call_start|>", "lfm2"),
    ],
)
def test_the_chat_template_tells_the_syntax(template: str, parser: str) -> None:
    assert dialects_for(None, template) == dialects_for(parser, None)
    assert len(dialects_for(None, "{{ messages }}")) > 10


CALL_TEXT = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        f"<think>maybe {CALL_TEXT}? no.</think>The answer is 4.",
        f"maybe {CALL_TEXT}? no.</think>The answer is 4.",
        f"<think>maybe {CALL_TEXT}",
        f"[THINK]maybe {CALL_TEXT}[/THINK]no",
        f"a<think>maybe {CALL_TEXT}</think>b<think>{CALL_TEXT}</think>",
    ],
)
def test_calls_within_reasoning_are_none(text: str) -> None:
    assert parse_tool_calls(text, TOOLS) == ParsedText(text, ())


def test_calls_after_reasoning_are_read() -> None:
    for opened, text in ((False, f"<think>{CALL_TEXT}</think>{CALL_TEXT}"), (True, f"{CALL_TEXT}</think>{CALL_TEXT}")):
        parsed = parse_tool_calls(text, TOOLS, within_reasoning=opened)
        assert parsed.content == text.removesuffix(CALL_TEXT)
        assert len(parsed.calls) == 1
    assert parse_tool_calls(CALL_TEXT, TOOLS, within_reasoning=True).calls == ()
    whole = parse_tool_calls('<think>hm</think>\n{"name": "add", "parameters": {"a": 1}}', TOOLS)
    assert (whole.content, len(whole.calls)) == ("<think>hm</think>", 1)
    assert len(parse_tool_calls('<tool_call>{"name": "add", "arguments": {"s": "</think>"}}', TOOLS).calls) == 1
    assert len(parse_tool_calls(f"The tag <think> begins it. {CALL_TEXT}", TOOLS).calls) == 1


def test_an_unknown_function_is_dropped_and_the_known_one_kept() -> None:
    unknown = '<tool_call>{"name": "mul", "arguments": {}}</tool_call>'
    parsed = parse_tool_calls(f'{unknown}<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>', TOOLS)
    assert parsed == ParsedText(unknown, ({"name": "add", "arguments": "{}"},))


_PIECES = ("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "add", "(")
_MORE = (")", '{"name": "add"', ', "arguments": ', "{", "}", "[", "]", "1", "=", "<arg_key>", "</arg_key>", "\n", ",")


@given(st.lists(st.sampled_from([*_PIECES, *_MORE]) | st.text(max_size=3), max_size=20).map("".join))
def test_any_text_can_be_read(text: str) -> None:
    parsed = parse_tool_calls(text, TOOLS)
    assert all(call["name"] in ("add", "tools.sub") for call in parsed.calls)
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in parsed.calls)
    assert parsed.calls or (parsed.content or "") == text


# Answers -------------------------------------------------------------------------------------------------------------

EOS = 258


class ScriptedBackend(Backend):
    """Generates a given text, byte by byte."""

    name = "scripted"
    engine_distribution = "pytest"
    says = "hello"
    ids: list[int] | None = None
    logprob: float | None = None
    reason = FinishReason.STOP

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset({Capability.STREAMING, Capability.ABORT, Capability.LOGPROBS_TEMPERATURE})

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return ModelInfo(260, 4096, (EOS,), "float32", "scripted", 0, "cpu")

    async def close(self) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        ids = list(self.says.encode() if self.ids is None else self.ids)
        stopped = self.reason is FinishReason.STOP
        ids += [EOS] * stopped
        return GenerateResult(
            ids,
            self.reason,
            [VersionSpan("old", 0, 1), VersionSpan("new", 1, len(ids))],
            matched_stop=EOS if stopped else None,
            logprobs=self._logprobs(ids),
            cached_tokens=4 if request.request_id.endswith("/1") else 8,
        )

    def _logprobs(self, ids: list[int]) -> list[float]:
        return [-float(token) if self.logprob is None else self.logprob for token in ids]

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        result = await self.generate(request)
        for token in result.token_ids:
            yield TokenDelta([token], logprobs=self._logprobs([token]))
        yield TokenDelta([], logprobs=[], result=result)


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reads-tools"
    shutil.copytree(tiny_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest_asyncio.fixture
async def scripted(folder: Path) -> AsyncIterator[tuple[InferenceEngine, ScriptedBackend]]:
    config = EngineConfig(backend="scripted", model=str(folder))
    backend = ScriptedBackend(config)
    engine = InferenceEngine(
        config,
        backend,
        capabilities=ScriptedBackend.capabilities(config),
        isolation=Isolation.INLINE,
        versions={},
    )
    async with engine:
        yield engine, backend


Scripted = tuple[InferenceEngine, ScriptedBackend]
CALLS = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_tool_calls_come_back_as_such(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = CALLS
    answer = await engine.chat_completion({**CHAT, "tools": [TOOL], "n": 2})
    calls = [call for choice in answer["choices"] for call in choice["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert calls[0]["id"] != calls[1]["id"]
    for choice in answer["choices"]:
        assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")
        assert bytes(choice["token_ids"][:-1]).decode() == CALLS
    prompt = engine.decode(answer["prompt_token_ids"])
    assert json.loads(prompt.removesuffix("x")) == TOOL


async def test_calls_are_read_where_special_tokens_mark_them(scripted: Scripted) -> None:
    engine, backend = scripted
    inner = engine.tokenizer.inner
    backend.ids = [ord("A"), 258, *b'[{"name": "add", "arguments": {"a": 1}}]']
    marked = inner.convert_ids_to_tokens(258)
    dialect = Dialect(("special",), re.compile("z"), re.compile(re.escape(str(marked))), NamedWithin())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.openai.tool_calls_in_answer.dialects_for", lambda *_: (dialect,))
        (choice,) = (await engine.chat_completion({**CHAT, "tools": [TOOL]}))["choices"]
        chunks = [chunk async for chunk in engine.chat_completion_stream({**CHAT, "tools": [TOOL]})]
    assert choice["message"]["content"] == "A"
    whole = choice["message"].get("tool_calls", [])
    assert [call["function"] for call in whole] == [{"name": "add", "arguments": '{"a": 1}'}]
    streamed = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"] for call in streamed] == [{"name": "add", "arguments": '{"a": 1}'}]


async def test_answers_are_json_whatever_the_logprobs(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says, backend.logprob = "ab", float("-inf")
    chat = await engine.chat_completion({**CHAT, "logprobs": True})
    chunks = [chunk async for chunk in engine.chat_completion_stream({**CHAT, "logprobs": True})]
    text = await engine.completion({**TEXT, "logprobs": 0})
    pieces = [chunk async for chunk in engine.completion_stream({**TEXT, "logprobs": 0})]
    for answer in (chat, *chunks, text, *pieces):
        json.dumps(answer, allow_nan=False)
    assert chat["choices"][0]["logprobs"] is not None
    assert [entry["logprob"] for entry in chat["choices"][0]["logprobs"]["content"]] == [-9999.0] * 3
    backend.logprob = float("nan")
    with pytest.raises(NonFiniteLogits):
        await engine.chat_completion({**CHAT, "logprobs": True})


def test_top_logprobs_are_json_too() -> None:
    texts = TokenTexts(Tokenizer(byte_tokenizer()))
    top = [[(65, -1.0), (66, float("-inf"))]]
    laid_out = chat_logprobs(texts, [65], [-1.0], top)
    assert [entry["logprob"] for entry in laid_out["content"][0]["top_logprobs"]] == [-1.0, -9999.0]
    json.dumps(laid_out, allow_nan=False)
    json.dumps(completion_logprobs(texts, [65], [-1.0], top, [0]), allow_nan=False)


async def test_a_turn_without_calls_keeps_its_text(scripted: Scripted, folder: Path) -> None:
    engine, _ = scripted
    engine.tokenizer.inner.chat_template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}CALLS{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    nothing: object
    for nothing in ([], None):
        messages = [{"role": "assistant", "content": "text", "tool_calls": nothing}, {"role": "user", "content": "x"}]
        answer = await engine.chat_completion({"messages": messages})
        assert engine.decode(answer["prompt_token_ids"]) == "textx"
        prompt = ChatPrompt(messages=tuple(Message.model_validate(message) for message in messages))
        assert engine.tokenizer.encode(prompt) == answer["prompt_token_ids"]


async def test_without_tools_the_same_text_is_content(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = CALLS
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        (choice,) = (await engine.chat_completion({**CHAT, **fields}))["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_streamed_tool_calls_never_show_as_content(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = CALLS
    chunks = [chunk async for chunk in engine.chat_completion_stream({**CHAT, "tools": [TOOL]})]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "So:"
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": '{"a": 1}'})
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [token for choice in choices for token in choice["token_ids"]] == [*CALLS.encode(), EOS]


async def test_at_most_one_call_comes_back_if_the_request_says_so(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = CALLS * 2
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        asked = {**CHAT, "tools": [TOOL], "parallel_tool_calls": parallel}
        (choice,) = (await engine.chat_completion(asked))["choices"]
        chunks = [chunk async for chunk in engine.chat_completion_stream(asked)]
        assert len(choice["message"].get("tool_calls", [])) == count
        assert len([call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]) == count
        assert choice["finish_reason"] == "tool_calls"


async def test_a_demanded_call_wants_an_engine_that_holds_its_output_to_a_schema(scripted: Scripted) -> None:
    engine, _ = scripted
    for choice in ("required", named("add")):
        with pytest.raises(UnsupportedCapability) as refusal:
            await engine.chat_completion({**CHAT, "tools": [TOOL], "tool_choice": choice})
        assert refusal.value.capability == "structured_json"


async def test_an_echoed_stream_begins_with_the_prompt(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = "yz"
    payload = {"prompt": ["ab", [99]], "n": 2, "echo": True}
    whole = await engine.completion(payload)
    chunks = [chunk["choices"][0] async for chunk in engine.completion_stream(payload)]
    for expected, prompt in zip(whole["choices"], ([97, 98], [97, 98], [99], [99]), strict=True):
        first, *others = [choice for choice in chunks if choice["index"] == expected["index"]]
        assert (first["text"], first.get("prompt_token_ids")) == (f"{bytes(prompt).decode()}y", prompt)
        assert first["token_ids"] == [ord("y")], "the ids are the sampled ones"
        assert first["text"] + "".join(choice["text"] for choice in others) == expected["text"]


async def test_with_tools_a_stream_of_plain_text_is_whole(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = " no call\n"
    chunks = [chunk async for chunk in engine.chat_completion_stream({**CHAT, "tools": [TOOL]})]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == " no call\n"


async def test_a_choice_says_its_versions_its_stop_and_what_was_cached_for_all(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = "abc"
    answer = await engine.chat_completion({**CHAT, "n": 2})
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 8,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    choice = answer["choices"][0]
    assert (choice["weight_version"], choice["matched_stop"]) == (None, EOS)
    assert choice["weight_versions"] == [
        {"version": "old", "start": 0, "end": 1},
        {"version": "new", "start": 1, "end": 4},
    ]


async def test_an_aborted_choice_says_so(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says, backend.reason = CALLS, FinishReason.ABORT
    (choice,) = (await engine.chat_completion({**CHAT, "tools": [TOOL]}))["choices"]
    assert choice["finish_reason"] == "abort"
    assert {reason.value for reason in FinishReason} <= set(get_args(FinishReasonName))


async def test_characters_of_several_tokens_keep_their_bytes_and_offsets(scripted: Scripted) -> None:
    engine, backend = scripted
    backend.says = "a€b"
    (choice,) = (await engine.chat_completion({**CHAT, "logprobs": True}))["choices"]
    assert choice["logprobs"] is not None
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-float(token) for token in choice["token_ids"]]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in content[:-1]).decode() == "a€b"
    (text,) = (await engine.completion({**TEXT, "logprobs": 0}))["choices"]
    assert text["logprobs"] is not None
    assert text["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 3]
    assert text["logprobs"]["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "<|im_end|>"]
    streamed = [c async for chunk in engine.completion_stream({**TEXT, "logprobs": 0}) for c in chunk["choices"]]
    offsets = [offset for c in streamed if c["logprobs"] for offset in c["logprobs"]["text_offset"]]
    assert offsets == text["logprobs"]["text_offset"]


async def test_what_a_chat_template_does_not_read_is_refused(scripted: Scripted) -> None:
    engine, _ = scripted
    with pytest.raises(InvalidRequest, match="does not read 'thinking'") as refusal:
        await engine.chat_completion({**CHAT, "chat_template_kwargs": {"thinking": True}})
    assert refusal.value.field == "chat_template_kwargs"


async def test_the_model_answers_to_its_folders_name(scripted: Scripted) -> None:
    engine, _ = scripted
    assert (await engine.chat_completion({**CHAT, "model": "reads-tools"}))["model"] == "reads-tools"
    with pytest.raises(InvalidRequest, match="is not served here") as refusal:
        await engine.completion({**TEXT, "model": "reads"})
    assert refusal.value.field == "model"
