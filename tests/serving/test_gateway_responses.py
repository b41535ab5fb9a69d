"""The token-capture gateway for agents that speak OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, InvalidRequest
from drivetrain_serving.gateway.openai_responses import to_chat
from gateways import Gateway, gateway_of, sampled
from scripted_backend import CALL, ScriptedBackend, scripted_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS: Final[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}]
Talking = tuple[Gateway, ScriptedBackend, InferenceEngine]


@pytest_asyncio.fixture(loop_scope="session")
async def talking(model: Path, tmp_path: Path) -> AsyncIterator[Talking]:
    async with scripted_engine(model, tmp_path / "model") as (engine, backend), gateway_of(engine) as gateway:
        yield gateway, backend, engine


async def respond(gateway: Gateway, given: Any, *, stream: bool = False, **fields: Any) -> Any:
    if not stream:
        return await gateway.api.responses.create(model="policy", input=given, **fields)
    async with gateway.api.responses.stream(model="policy", input=given, **fields) as events:
        text = ""
        numbers: list[int] = []
        last: Any = None
        async for last in events:
            numbers.append(last.sequence_number)
            text += last.delta if last.type == "response.output_text.delta" else ""
    assert last.type in ("response.completed", "response.incomplete")
    whole = last.response
    assert numbers == list(range(len(numbers)))
    assert text == whole.output_text
    return whole


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_a_tool_is_one_branch(talking: Talking, stream: bool) -> None:
    gateway, backend, engine = talking
    backend.says = ["So: " + CALL + CALL, "two"]
    given: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "add"}]
    fields: Any = {"instructions": "You add.", "tools": TOOLS, "stream": stream, "store": False}
    first = await respond(gateway, given, **fields)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert first.output_text == "So:"
    given += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    given += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = await respond(gateway, given, **fields)
    assert (second.output_text, second.status) == ("two", "completed")
    (branch,) = await gateway.branches()
    assert [bytes(run[:-1]).decode() for run in sampled(branch)] == ["So: " + CALL + CALL, "two"]
    assert second.usage.total_tokens == len(branch["token_ids"])
    text = engine.decode(branch["token_ids"], skip_special_tokens=False)
    assert "<|im_start|>system\nYou add.\n\nBe brief.<|im_end|>" in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "says", "arguments"),
    [
        (
            "required",
            '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {}}]',
            ['{"a": 1}', "{}"],
        ),
        ({"type": "function", "name": "add"}, '{"a": 3}', ['{"a": 3}']),
        ("required", '[{"name": "add", "parameters": [1, "]"]}, {"name": "add", "parameters": 2}]', ['[1, "]"]', "2"]),
        ({"type": "function", "name": "add"}, "[3]", ["[3]"]),
    ],
)
async def test_a_demanded_call_is_an_item(
    talking: Talking, choice: Any, says: str, arguments: list[str], stream: bool
) -> None:
    gateway, backend, _ = talking
    backend.says = [says]
    asked: Any = {"tools": TOOLS, "tool_choice": choice, "stream": stream, "parallel_tool_calls": len(arguments) > 1}
    answer = await respond(gateway, "add", **asked)
    assert [(item.type, item.name, item.arguments, item.status) for item in answer.output] == [
        ("function_call", "add", given, "completed") for given in arguments
    ]
    assert answer.parallel_tool_calls == (len(arguments) > 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_demanded_call_that_was_cut_off_is_incomplete(talking: Talking, stream: bool) -> None:
    gateway, backend, _ = talking
    backend.says = ['{"a": 1…']
    answer = await respond(gateway, "add", tools=TOOLS, tool_choice={"type": "function", "name": "add"}, stream=stream)
    (item,) = answer.output
    assert (item.arguments, item.status, answer.status) == ('{"a": 1', "incomplete", "incomplete")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_off_is_incomplete(talking: Talking, stream: bool) -> None:
    gateway, backend, _ = talking
    backend.says = ["cut o…"]
    answer = await respond(gateway, "hello", stream=stream, max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "cut o"


async def test_it_continues_what_chat_completions_began(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = ["well", "good"]
    messages, _ = await gateway.talk(["hello"])
    given = [{"role": message["role"], "content": message["content"]} for message in messages]
    await respond(gateway, [*given, {"role": "user", "content": "go on"}])
    (branch,) = await gateway.branches()
    assert branch["turns"] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls='no'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "mul"}}, "'mul' is none of tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": 3, "top_p": 7}, "top_p"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(talking: Talking, fields: dict[str, Any], says: str) -> None:
    gateway, _, _ = talking
    with pytest.raises(openai.BadRequestError, match=says):
        await gateway.api.responses.create(**{"model": "policy", "input": "hello", **fields})
    assert await gateway_is_empty(gateway)


async def gateway_is_empty(gateway: Gateway) -> bool:
    listed = (await gateway.http.get("/sessions")).json()["sessions"]
    return not any(session["turns"] for session in listed)


def test_fields_of_chat_completions_pass() -> None:
    same = {"seed": 3, "min_p": 0.2, "top_k": 4, "stop": ["x"], "logit_bias": {"3": 1}}
    assert to_chat({"input": "hi", "store": False, "include": ["reasoning.encrypted_content"], **same}) == {
        "messages": [{"role": "user", "content": "hi"}],
        **same,
    }


@pytest.mark.parametrize("field", [{"n": 2}, {"top_logprobs": 3}, {"include": ["message.output_text.logprobs"]}])
def test_fields_that_the_response_has_no_place_for_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(field))):
        to_chat({"input": "hi", **field})
