"""Answers of ``/inference/v1/generate`` are derendered to those of OpenAI's routes, whole and chunk by chunk."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from documented_answers import Document
from drivetrain import create_engine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING
from models_with_tools import model_that_reads_tools

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "boolean"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
CALLED: dict[str, Any] = {
    "messages": MESSAGES, "tools": TOOLS, "max_tokens": 80, "temperature": 0,
    "logit_bias": {"93": 100, "9": -100, "10": -100, "13": -100, "32": -100},
}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server. Its answers are compared with the server's document."""
    folder = model_that_reads_tools(tmp_path_factory.mktemp("models") / "tools")
    async with (
        create_engine("transformers", model=str(folder)) as engine,
        Server(engine, ServerConfig(port=0)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client,
    ):
        document = Document((await client.get("/openapi.json")).json())

        async def compare(response: httpx.Response) -> None:
            await response.aread()
            assert document.errors(response) == []

        client.event_hooks = {"response": [compare]}
        yield client


async def post(client: httpx.AsyncClient, path: str, body: object) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *pieces, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(piece) for piece in pieces]


def core(choice: Any) -> Any:
    """Return what a client reads of a choice, without the random ids of calls."""
    message = choice.get("message") or {}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    said = message.get("content") if message else choice["text"]
    return said, calls, choice["finish_reason"], choice["stop_reason"], choice["logprobs"]


def require_same(one: Any, other: Any) -> None:
    """Compare JSON, whose numbers may differ by the rounding of another batch."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=1e-4)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            require_same(*pair)
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_same(one[key], other[key])
    else:
        assert one == other


CHATS: list[dict[str, Any]] = [
    {"messages": MESSAGES, "max_tokens": 24, "seed": 1},
    {"messages": MESSAGES, "max_tokens": 24, "seed": 2, "n": 2, "logprobs": True, "top_logprobs": 2},
    {"messages": MESSAGES, "max_tokens": 200, "seed": 4, "stop_token_ids": list(range(97, 123))},
    {"messages": MESSAGES, "max_tokens": 200, "seed": 4, "stop_token_ids": [65, 66], "include_stop_str_in_output": True,
     "stop": ["zzz"]},
    {**CALLED, "tool_choice": "required"},
    {**CALLED, "tool_choice": NAMED},
    {**CALLED, "tool_choice": "auto", "max_tokens": 8},
]  # fmt: skip


@pytest.mark.parametrize("chat", CHATS)
async def test_a_derendered_chat_is_that_of_the_chat_route(client: httpx.AsyncClient, chat: dict[str, Any]) -> None:
    direct = await post(client, CHAT, chat)
    rendered = await post(client, f"{CHAT}/render", chat)
    generated = await post(client, "/inference/v1/generate", rendered)
    asked = {"generate_response": generated, "chat_request": chat, "prompt_token_ids": rendered["token_ids"]}
    found = await post(client, f"{CHAT}/derender", {**asked, "prompt_tokens": len(rendered["token_ids"])})
    require_same(list(map(core, found["choices"])), list(map(core, direct["choices"])))
    assert found["id"] == generated["request_id"]
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
    assert found["usage"]["prompt_tokens"] == len(rendered["token_ids"])


@pytest.mark.parametrize("chat", [chat for chat in CHATS if chat.get("n") != 2])
async def test_a_derendered_stream_is_that_of_the_chat_route(client: httpx.AsyncClient, chat: dict[str, Any]) -> None:
    chat = {**chat, "logprobs": True}
    direct = await events(client, CHAT, chat)
    streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    rendered = await post(client, f"{CHAT}/render", streamed)
    state = None
    chunks = []
    for event in await events(client, "/inference/v1/generate", rendered):
        asked = {"generate_chunk": event, "chat_request": streamed, "prompt_token_ids": rendered["token_ids"]}
        answer = await post(client, f"{CHAT}/derender", {**asked, "stream": True, "stream_state": state})
        state = answer["stream_state"]
        chunks.append(answer["chunk"])
    require_same(joined(chunks), joined(direct))
    roles = [one["delta"]["role"] for chunk in chunks for one in chunk["choices"] if one["delta"]["role"]]
    assert roles == ["assistant"]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(one["logprobs"]["content"]) for one in logged(chunks))


def logged(chunks: list[Any]) -> list[Any]:
    return [one for chunk in chunks for one in chunk["choices"] if one["logprobs"]]


def joined(chunks: list[Any]) -> Any:
    choices = [one for chunk in chunks for one in chunk["choices"]]
    calls: dict[int, list[str]] = {}
    for one in choices:
        for part in one["delta"].get("tool_calls") or []:
            known = calls.setdefault(part["index"], ["", ""])
            known[0] += part["function"].get("name") or ""
            known[1] += part["function"]["arguments"]
    content = "".join(one["delta"].get("content") or "" for one in choices)
    logprobs = [entry for one in logged(chunks) for entry in one["logprobs"]["content"]]
    ends = [(one["finish_reason"], one["stop_reason"]) for one in choices if one["finish_reason"]]
    return content, calls, logprobs, ends


async def test_derendered_completions_are_those_of_the_route(client: httpx.AsyncClient) -> None:
    asked = {"prompt": [[5, 6], [7]], "max_tokens": 24, "seed": 3, "logprobs": 1, "n": 2}
    direct = await post(client, COMPLETIONS, asked)
    rendered = await post(client, f"{COMPLETIONS}/render", asked)
    answers = [await post(client, "/inference/v1/generate", one) for one in rendered]
    body = {"generate_responses": answers, "completion_request": asked, "prompt_tokens": [2, 1]}
    found = await post(client, f"{COMPLETIONS}/derender", body)
    require_same(list(map(core, found["choices"])), list(map(core, direct["choices"])))
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 3


async def test_a_derendered_stream_of_text_needs_its_last_ids_alone(client: httpx.AsyncClient) -> None:
    asked = {"prompt": [5, 6], "max_tokens": 80, "seed": 5, "logprobs": 0}
    direct = await post(client, COMPLETIONS, asked)
    (rendered,) = await post(client, f"{COMPLETIONS}/render", {**asked, "stream": True})
    state, text, logprobs = None, "", []
    for event in await events(client, "/inference/v1/generate", rendered):
        body = {"stream": True, "generate_chunk": event, "stream_state": state, "completion_request": asked}
        answer = await post(client, f"{COMPLETIONS}/derender", body)
        state = answer["stream_state"]
        assert len(state["output_token_ids"]) <= 64
        (choice,) = answer["chunk"]["choices"]
        text += choice["text"]
        logprobs.append(choice["logprobs"])
    (whole,) = direct["choices"]
    assert text == whole["text"]
    for name in ("tokens", "token_logprobs"):
        require_same([one for part in logprobs if part for one in part[name]], whole["logprobs"][name])


GENERATED: dict[str, Any] = {"request_id": "r", "choices": [{"index": 0, "token_ids": [104, 105]}]}


def with_choice(**fields: object) -> dict[str, Any]:
    return {"request_id": "r", "choices": [{"index": 0, "token_ids": [104], **fields}]}


LIKELY = {"content": [{"token_id": 104, "logprob": -1.0, "top_logprobs": [{"token_id": 2**40, "logprob": -2.0}]}]}


async def test_a_response_alone_is_decoded(client: httpx.AsyncClient) -> None:
    chat = await post(client, f"{CHAT}/derender", {"generate_response": GENERATED})
    assert chat["choices"][0]["message"]["content"] == "hi"
    assert (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]) == (0, 2)
    text = await post(client, f"{COMPLETIONS}/derender", {"generate_responses": [GENERATED, GENERATED]})
    assert [(choice["index"], choice["text"]) for choice in text["choices"]] == [(0, "hi"), (1, "hi")]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {}, "generate_response is missing"),
        (CHAT, {"stream": True}, "generate_chunk is missing"),
        (CHAT, {"generate_response": {**GENERATED, "output_mode": "text"}}, "output_mode"),
        (CHAT, {"generate_response": {"request_id": "r", "choices": []}}, "has no choices"),
        (CHAT, {"generate_response": with_choice(token_ids=[])}, "has empty or null token_ids"),
        (CHAT, {"generate_response": with_choice(token_ids=[10**9])}, "outside the vocabulary"),
        (CHAT, {"generate_response": GENERATED, "prompt_token_ids": [2**40]}, "outside the vocabulary"),
        (CHAT, {"stream": True, "generate_chunk": GENERATED, "prompt_token_ids": [300]}, "outside the vocabulary"),
        (CHAT, {"generate_response": with_choice(logprobs=LIKELY)}, "top_logprobs: token id"),
        (CHAT, {"stream": True, "generate_chunk": with_choice(logprobs=LIKELY)}, "top_logprobs: token id"),
        (CHAT, {"generate_response": with_choice(token_ids=[5] * 5000)}, "more than the context length"),
        (CHAT, {"generate_response": with_choice(logprobs={"content": []})}, "logprobs.content has 0 entries"),
        (CHAT, {"generate_response": GENERATED, "prompt_token_ids": [5] * 5000}, "more than the context length"),
        (CHAT, {"generate_response": GENERATED, "chat_request": {"messages": 3}}, "messages"),
        (CHAT, {"stream": True, "generate_chunk": {"request_id": "r", "choices": [{}, {"index": 1}]}}, "at most one"),
        (CHAT, {"stream": True, "generate_chunk": GENERATED, "stream_state": {"output_token_ids": [5]}}, "must be"),
        (COMPLETIONS, {"generate_responses": []}, "must not be empty"),
        (COMPLETIONS, {"generate_responses": [GENERATED], "prompt_tokens": [1, 2]}, "must equal"),
        (COMPLETIONS, {"generate_responses": [GENERATED], "prompt_tokens": [-1]}, "prompt_tokens"),
        (COMPLETIONS, {"generate_responses": [GENERATED], "prompt_token_ids": [1]}, "expected the ids"),
        (COMPLETIONS, {"stream": True, "generate_chunk": GENERATED, "prompt_token_ids": [[1]]}, "expected the ids"),
    ],
)
async def test_what_cannot_be_derendered_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], message: str
) -> None:
    response = await client.post(f"{path}/derender", json=body)
    assert response.status_code == 400, response.text
    assert message in response.text


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    for path, given in ((CHAT, {"generate_response": GENERATED}), (COMPLETIONS, {"generate_responses": [GENERATED]})):
        response = await client.post(f"{path}/derender", json={**given, "model": "nobody"})
        assert response.status_code == 404
