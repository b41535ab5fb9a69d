"""Rendered requests: ``/inference/v1/generate`` answers them as OpenAI's routes answer what they were rendered from."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from drivetrain import InferenceEngine
from engines import until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SEEDED = {"max_tokens": 12, "seed": 3}


async def posted(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> Any:
    response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "fields",
    [
        {**SEEDED, "temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"max_completion_tokens": 12, "temperature": 0, "min_tokens": 4, "logit_bias": {"97": 2.5}},
        {**SEEDED, "n": 2, "stop": ["e"], "stop_token_ids": [97], "include_stop_str_in_output": True},
        {**SEEDED, "allowed_token_ids": [97, 98, 99]},
        {**SEEDED, "structured_outputs": {"choice": ["yes", "no"]}},
        {**SEEDED, "response_format": {"type": "json_object"}, "max_tokens": 40},
        {**SEEDED, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5, "model": "one"},
        {**SEEDED, "logprobs": True, "top_logprobs": -1, "max_tokens": 2},
        {**SEEDED, "chat_template_kwargs": {}, "add_generation_prompt": False, "priority": 2},
    ],
)
async def test_a_rendered_chat_has_the_chats_tokens(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    rendered = await posted(client, f"{CHAT}/render", body)
    found = await posted(client, "/inference/v1/generate", rendered)
    expected = await posted(client, CHAT, {**body, "return_token_ids": True})
    assert rendered["token_ids"] == expected["prompt_token_ids"]
    assert [one["token_ids"] for one in found["choices"]] == [one["token_ids"] for one in expected["choices"]]
    assert [one["finish_reason"] for one in found["choices"]] == [one["finish_reason"] for one in expected["choices"]]
    if "logprobs" in fields:
        for ours, theirs in zip(found["choices"], expected["choices"], strict=True):
            assert [one["logprob"] for one in ours["logprobs"]["content"]] == pytest.approx(
                [one["logprob"] for one in theirs["logprobs"]["content"]], abs=1e-4
            )
            counts = [[len(one["top_logprobs"]) for one in each["logprobs"]["content"]] for each in (ours, theirs)]
            assert counts[0] == counts[1]


async def test_each_prompt_of_a_completion_is_a_request(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["hello", "good morning"], **SEEDED, "prompt_logprobs": 1}
    rendered = await posted(client, f"{COMPLETION}/render", body, **{"X-Request-Id": "mine"})
    assert [one["request_id"] for one in rendered] == ["cmpl-mine-0", "cmpl-mine-1"]
    expected = await posted(client, COMPLETION, {**body, "return_token_ids": True})
    for one, choice in zip(rendered, expected["choices"], strict=True):
        found = await posted(client, "/inference/v1/generate", one)
        assert one["token_ids"] == choice["prompt_token_ids"]
        assert found["choices"][0]["token_ids"] == choice["token_ids"]
        assert len(found["prompt_logprobs"]) == len(one["token_ids"])
    (alone,) = await posted(client, f"{COMPLETION}/render", {"prompt": [[5, 6]]})
    assert (alone["token_ids"], alone["sampling_params"]) == ([5, 6], {"max_tokens": 16})
    whole = {"logprobs": -1, "prompt_logprobs": -1}
    (alone,) = await posted(client, f"{COMPLETION}/render", {"prompt": [[5, 6]], **whole})
    assert alone["sampling_params"] == {**whole, "max_tokens": 16}


async def test_without_a_bound_there_is_the_contexts(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    rendered = await posted(client, f"{CHAT}/render", {"messages": MESSAGES, "stream": True, "model": "policy"})
    most = engine.model_info.context_length - len(rendered["token_ids"])
    assert rendered["sampling_params"] == {"max_tokens": most}
    assert (rendered["stream"], rendered["stream_options"], rendered["model"]) == (True, None, "policy")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETION, {"prompt": [5], "temperature": -1}, 400, "temperature"),
        (COMPLETION, {"prompt": [5] * 5000}, 400, "context length"),
        (COMPLETION, {"prompt": [10**6]}, 400, "vocabulary"),
        (COMPLETION, {"prompt": []}, 400, "prompt"),
        (COMPLETION, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
        (COMPLETION, {"prompt": "a", "stop_regex": "a+"}, 400, "stop_regex"),
        (COMPLETION, {"prompt": "a", "model": "nobody"}, 404, "nobody"),
        (CHAT, {"messages": []}, 400, "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
            400,
            "images",
        ),
    ],
)
async def test_requests_that_cannot_be_rendered_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    response = await client.post(f"{path}/render", json=body)
    assert response.status_code == status, response.text
    assert says in response.json()["error"]["message"]


async def test_generations_are_aborted_by_the_ids_of_rendered_requests(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    rendered = await posted(client, f"{CHAT}/render", {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True})
    running = asyncio.create_task(client.post("/inference/v1/generate", json=rendered))
    await until_running(engine, 1)
    path = "/inference/v1/abort_requests"
    for ids in ([], ["nobody"]):
        answer = await client.post(path, json={"request_ids": ids})
        assert (answer.status_code, answer.content) == (200, b"")
    assert not running.done(), "no ids end no request"
    await client.post(path, json={"request_ids": [rendered["request_id"]]})
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"
    for body in ({}, {"request_ids": 7}, {"request_ids": [7]}, {"request_ids": ""}, {"request_ids": False}):
        assert (await client.post(path, json=body)).status_code == 400
