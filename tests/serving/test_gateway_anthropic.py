"""The token-capture gateway for agents that speak Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, InvalidRequest
from drivetrain.types.sampling import JsonSchema
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.gateway.anthropic import to_chat
from engines import HANGING
from gateways import Gateway, gateway_of, sampled
from scripted_backend import CALL, ScriptedBackend, scripted_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

API: Final = "a-key-for-requests"
OF_OTHER_VALUES: list[dict[str, Any]] = [
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array"}}},
    {"items": {}},
    {"title": "x"},
]
"""Schemas that accept other values than objects."""
TOOLS: Final = [
    {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
]
Talking = tuple[Gateway, ScriptedBackend, InferenceEngine]


@pytest_asyncio.fixture(loop_scope="session")
async def talking(model: Path, tmp_path: Path) -> AsyncIterator[Talking]:
    async with scripted_engine(model, tmp_path / "model") as (engine, backend), gateway_of(engine) as gateway:
        yield gateway, backend, engine


async def message(gateway: Gateway, **body: Any) -> Any:
    response = await gateway.http.post("/sessions/a/v1/messages", json={"model": "policy", "max_tokens": 64, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(gateway: Gateway, **body: Any) -> list[Any]:
    fields = {"model": "policy", "max_tokens": 64, "stream": True, **body}
    response = await gateway.http.post("/sessions/a/v1/messages", json=fields)
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(found: list[Any]) -> Any:
    """Return the message of a stream's events, as Anthropic's client does."""
    first, *others = found
    assert first["type"] == "message_start"
    whole = first["message"]
    for event in others:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(whole["content"])
                whole["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                whole["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                whole["content"][event["index"]]["json"] += event["delta"]["partial_json"]
            case "content_block_stop":
                block = whole["content"][event["index"]]
                if written := block.pop("json"):
                    block["input"] = json.loads(written)
            case "message_delta":
                whole |= event["delta"]
                whole["usage"] |= event["usage"]
    assert others[-1] == {"type": "message_stop"}
    return whole


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_a_tool_is_one_branch(talking: Talking, stream: bool) -> None:
    gateway, backend, engine = talking
    backend.says = ["So: " + CALL, "two"]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "add"}]}]
    answers = []
    for _ in range(2):
        fields: Any = {"system": [{"type": "text", "text": "You add."}], "messages": messages, "tools": TOOLS}
        answer = put_together(await events(gateway, **fields)) if stream else await message(gateway, **fields)
        answers.append(answer)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "2"}]}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages = [
            *messages,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": results},
        ]
    first, second = answers
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
    assert first["content"][1]["input"] == {"a": 1, "b": [12]}
    assert (first["stop_reason"], second["stop_reason"]) == ("tool_use", "end_turn")
    assert second["content"] == [{"type": "text", "text": "two"}]
    (branch,) = await gateway.branches()
    assert [bytes(run[:-1]).decode() for run in sampled(branch)] == ["So: " + CALL, "two"]
    usage = second["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == len(branch["token_ids"])
    text = engine.decode(branch["token_ids"], skip_special_tokens=False)
    assert "<|im_start|>system\nYou add.<|im_end|>" in text
    assert "<|im_start|>tool\n2<|im_end|>" in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "says", "inputs"),
    [
        (
            {"type": "any"},
            '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {}}]',
            [{"a": 1}, {}],
        ),
        ({"type": "any", "disable_parallel_tool_use": True}, '[{"name": "add", "parameters": {"a": 2}}]', [{"a": 2}]),
        ({"type": "tool", "name": "add"}, '{"a": 3}', [{"a": 3}]),
    ],
)
async def test_a_demanded_call_is_a_block(
    talking: Talking, choice: dict[str, Any], says: str, inputs: list[Any], stream: bool
) -> None:
    gateway, backend, _ = talking
    backend.says = [says, "two"]
    asked: Any = {"messages": [{"role": "user", "content": "add"}], "tools": TOOLS, "tool_choice": choice}
    answer = put_together(await events(gateway, **asked)) if stream else await message(gateway, **asked)
    assert [(block["type"], block["name"], block["input"]) for block in answer["content"]] == [
        ("tool_use", "add", given) for given in inputs
    ]
    assert answer["stop_reason"] == "tool_use"
    assert isinstance(backend.grammar, JsonSchema)
    single = "disable_parallel_tool_use" in choice
    assert json.loads(backend.grammar.json_schema).get("maxItems") == (1 if single else None)
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "2"} for block in answer["content"]]
    after = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    await message(gateway, messages=[*asked["messages"], *after], tools=TOOLS)
    (branch,) = await gateway.branches()
    assert [bytes(run[:-1]).decode() for run in sampled(branch)] == [says, "two"], "the sampled ids are kept"


async def test_a_demanded_call_that_was_cut_off_is_left_out(talking: Talking) -> None:
    gateway, backend, _ = talking
    asked: Any = {"messages": [{"role": "user", "content": "add"}], "tools": TOOLS}
    for choice, says in (
        ({"type": "any"}, '[{"name": "add", "parameters": {"a…'),
        ({"type": "tool", "name": "add"}, '{"a…'),
    ):
        backend.says = [says]
        answer = await message(gateway, **asked, tool_choice=choice)
        assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


async def test_both_apis_continue_one_conversation(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = ["well", "good"]
    first = await message(gateway, messages=[{"role": "user", "content": "hello"}])
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first["content"][0]["text"]}]
    await gateway.ask([*chat, {"role": "user", "content": "go on"}])
    (branch,) = await gateway.branches()
    assert branch["turns"] == [0, 1]


async def test_stops_say_what_they_are(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = ["cut o…"]
    answer = await message(gateway, messages=[{"role": "user", "content": "hello"}])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)


async def test_tokens_are_counted_and_nothing_is_recorded(talking: Talking) -> None:
    gateway, backend, _ = talking
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    counted = (await gateway.http.post("/sessions/a/v1/messages/count_tokens", json=body)).json()
    assert (await gateway.http.get("/sessions")).json() == {"sessions": []}
    backend.says = ["well"]
    usage = (await message(gateway, messages=body["messages"]))["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages.0"),
        (
            {
                "messages": [
                    *[{"role": role, "content": "a"} for role in ("user", "assistant")],
                    {"role": "user", "content": []},
                ]
            },
            "messages.2.content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "mul"}}, "'mul' is none of tools"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": [{"name": "add", "input_schema": {"type": "array"}}]}, "input_schema.type='array'"),
        (
            {"tools": [{"name": "add", "input_schema": {"anyOf": [{}]}}], "tool_choice": {"type": "any"}},
            "the input of a demanded call is an object",
        ),
        *(
            (
                {"tools": [{"name": "add", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "add"}},
                "the input of a demanded call is an object",
            )
            for schema in OF_OTHER_VALUES
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": "no"}},
            "tool_choice.disable_parallel_tool_use='no'",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
        ({"model": "another", "stream": True}, "another"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_in_anthropics_form(
    talking: Talking, fields: dict[str, Any], says: str
) -> None:
    gateway, _, _ = talking
    body = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}], **fields}
    refused = await gateway.http.post("/sessions/a/v1/messages", json=body)
    error = refused.json()
    assert (refused.status_code, error["error"]["type"]) in [(400, "invalid_request_error"), (404, "not_found_error")]
    assert error["type"] == "error"
    assert says in error["error"]["message"]


async def test_a_body_that_is_no_json_is_refused_in_anthropics_form(talking: Talking) -> None:
    gateway, _, _ = talking
    headers = {"content-type": "application/json"}
    refused = await gateway.http.post("/sessions/a/v1/messages", content=b"{", headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_the_key_may_come_as_anthropics_clients_send_it(talking: Talking) -> None:
    _, backend, engine = talking
    backend.says = ["well"]
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    async with Server(engine, ServerConfig(port=0, api_key=API)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as http:
            statuses = [
                (await http.post("/sessions/a/v1/messages", json=body, headers={"x-api-key": key})).status_code
                for key in (API + "x", API)
            ]
    assert statuses == [401, 200]


async def test_a_block_for_the_accounting_is_not_shown_to_the_model() -> None:
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: a=1;", "You", "add.")]
    chat = to_chat({"system": blocks, "messages": []}, "")
    assert chat["messages"] == [{"role": "system", "content": "You\nadd."}]


async def test_thinking_is_told_to_a_template_that_reads_it() -> None:
    body = {"messages": [], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert "chat_template_kwargs" not in to_chat(body, "")
    assert to_chat(body, "{% if enable_thinking %}")["chat_template_kwargs"] == {"enable_thinking": True}


async def test_an_answer_goes_on_from_what_the_agent_began(talking: Talking) -> None:
    gateway, backend, engine = talking
    backend.says = ["1}"]
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": '{"a": '}]
    answer = await message(gateway, messages=begun)
    assert answer["content"] == [{"type": "text", "text": "1}"}]
    (branch,) = await gateway.branches()
    text = engine.decode(branch["token_ids"], skip_special_tokens=False)
    assert text.endswith('<|im_start|>assistant\n{"a": 1}<|im_end|>')


@pytest.mark.parametrize("schema", [{}, {"properties": {}}, {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}])
def test_a_call_can_be_demanded_of_a_tool_whose_inputs_are_objects(schema: dict[str, object]) -> None:
    tools = [{"name": "add", "input_schema": schema}, {"name": "other", "input_schema": {"enum": [1]}}]
    chat = to_chat({"messages": [], "tools": tools, "tool_choice": {"type": "tool", "name": "add"}}, "")
    assert chat["tools"][0]["function"]["parameters"] == schema


def test_fields_of_chat_completions_pass() -> None:
    same = {"seed": 3, "min_p": 0.2, "top_k": 4, "stop_token_ids": [4], "structured_outputs": {"regex": "a"}}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    chat = to_chat({"messages": [], "output_format": schema, "output_config": {"effort": "low"}, **same}, "")
    assert chat == {
        "messages": [],
        **same,
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_client_is_told_to_send_all_messages_itself(talking: Talking, thread: dict[str, str]) -> None:
    """Anthropic's package asks the server to hold the messages, and sends them all after this error."""
    gateway, _, _ = talking
    body = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}], "thread": thread}
    refused = await gateway.http.post("/sessions/a/v1/messages", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("field", [{"n": 2}, {"logprobs": True}, {"output_format": {"type": "text"}}])
def test_fields_that_the_answer_has_no_place_for_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(field))):
        to_chat({"messages": [], **field}, "")
