"""Lines of JSON that tell of requests."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, PauseMode
from drivetrain_serving import Server, ServerConfig
from engines import HANGING, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "a-key-for-requests"
SECRET = "a-secret-prompt"
TOKENS: dict[str, object] = {"max_tokens": 8, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="session")
async def logged(engine: InferenceEngine) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(port=0, served_model_name=("policy",), api_key=KEY, log_requests=True)
    async with Server(engine, config) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=HANGING) as client:
            yield client


async def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Wait for the only line, which may come after its answer."""
    await until(lambda: len(caplog.messages) > 0)
    (message,) = caplog.messages
    caplog.clear()
    found: dict[str, Any] = json.loads(message)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_line_with_its_tokens_and_their_version(
    logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "drivetrain.serving.requests")
    body = {"prompt": [[5, 6], [5, 6, 7]], "n": 2, "stream": stream, "request_id": "mine", **TOKENS}
    response = await logged.post("/v1/completions", json=body)
    assert response.status_code == 200
    found = await line(caplog)
    assert {name: found[name] for name in ("method", "path", "status", "complete", "error")} == {
        "method": "POST", "path": "/v1/completions", "status": 200, "complete": True, "error": None,
    }  # fmt: skip
    assert found["request_id"].startswith("mine")
    assert (found["model"], found["prompts"], found["prompt_tokens"], found["generated_tokens"]) == ("policy", 2, 5, 32)
    assert found["finish_reasons"] == {"length": 4}
    assert found["weight_versions"] == ["initial"]
    assert 0 < found["first_token_seconds"] <= found["seconds"]


async def test_prompts_texts_and_keys_are_not_in_the_log(
    logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain.serving.requests")
    asked: list[tuple[str, dict[str, object]]] = [
        (f"/v1/completions?key={KEY}", {"prompt": SECRET, **TOKENS}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": -1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], **TOKENS}),
        ("/sessions/one/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], **TOKENS}),
        ("/tokenize", {"prompt": SECRET}),
    ]
    for path, body in asked:
        await logged.post(path, json=body)
    await until(lambda: len(caplog.messages) == len(asked))
    assert [json.loads(one)["path"] for one in caplog.messages] == [path.partition("?")[0] for path, _ in asked]
    assert SECRET not in caplog.text
    assert KEY not in caplog.text
    assert [json.loads(one)["error"] for one in caplog.messages] == [None, "InvalidRequest", None, None, None]
    assert [json.loads(one).get("generated_tokens") for one in caplog.messages] == [8, 0, 8, 8, None]


async def test_a_refused_key_and_a_wrong_path_are_lines(
    logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain.serving.requests")
    assert (await logged.get("/v1/models", headers={"Authorization": "Bearer wrong"})).status_code == 401
    assert (await line(caplog))["status"] == 401
    assert (await logged.get('/nowhere%0A"' + "x" * 1000)).status_code == 404
    found = await line(caplog)
    assert (found["status"], found["path"]) == (404, '/nowhere\n"' + "x" * 246)


async def test_a_client_that_leaves_a_stream_is_told(
    logged: httpx.AsyncClient, engine: InferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain.serving.requests")
    body = {"prompt": [5], "stream": True, "max_tokens": 400, "ignore_eos": True}
    async with logged.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_bytes())
        await engine.pause_generation(PauseMode.IN_PLACE)
    found = await line(caplog)
    await engine.continue_generation()
    assert (found["status"], found["complete"], found["finish_reasons"]) == (200, False, {})
    assert 0 < found["generated_tokens"] < 400


async def test_nothing_is_logged_unless_it_is_asked_for(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain.serving.requests")
    assert (await client.post("/v1/completions", json={"prompt": [5], **TOKENS})).status_code == 200
    assert caplog.messages == []
