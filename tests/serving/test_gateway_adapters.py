"""The token-capture gateway where requests name adapters, in both dialects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING
from gateways import user

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"messages": [user("hello")], "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest_asyncio.fixture(loop_scope="session")
async def sglang(engine: InferenceEngine, adapters: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A server of SGLang's dialect with the adapter ``three``."""
    config = ServerConfig(port=0, served_model_name=("policy",), dialect="sglang")
    async with Server(engine, config) as server, httpx.AsyncClient(base_url=server.url, timeout=HANGING) as http:
        given = {"lora_name": "three", "lora_path": str(adapters / "one")}
        assert (await http.post("/load_lora_adapter", json=given)).status_code == 200
        yield http
        assert (await http.post("/unload_lora_adapter", json={"lora_name": "three"})).status_code == 200


async def chat(client: httpx.AsyncClient, path: str, **fields: object) -> list[int]:
    response = await client.post(path, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


async def trajectory(client: httpx.AsyncClient, session: str) -> Any:
    return (await client.get(f"/sessions/{session}/trajectory")).json()


async def test_the_record_names_the_adapter_however_the_request_does(client: httpx.AsyncClient) -> None:
    base = await chat(client, "/v1/chat/completions", model="policy")
    by_model = await chat(client, "/sessions/model/v1/chat/completions", model="one")
    by_field = await chat(client, "/sessions/field/v1/chat/completions", model="policy", lora="one")
    assert by_model == by_field != base
    for session in ("model", "field"):
        assert [turn["model"] for turn in (await trajectory(client, session))["turns"]] == ["one"]


async def test_another_adapter_begins_a_branch(client: httpx.AsyncClient) -> None:
    path = "/sessions/both/v1/chat/completions"
    answer = (await client.post(path, json={**BODY, "model": "one"})).json()["choices"][0]["message"]["content"]
    more = [user("hello"), {"role": "assistant", "content": answer}, user("go on")]
    for name in ("two", "one"):
        await chat(client, path, model=name, messages=more)
    branches = (await trajectory(client, "both"))["branches"]
    assert [branch["turns"] for branch in branches] == [[1], [0, 2]]
    assert "of the model or adapter that it names" in branches[0]["begins_because"]


async def test_sessions_take_the_fields_of_sglangs_dialect(sglang: httpx.AsyncClient) -> None:
    route, session = "/v1/chat/completions", "/sessions/a/v1/chat/completions"
    base = await chat(sglang, route)
    for fields in ({"lora_path": "three"}, {"model": "policy:three"}):
        expected = await chat(sglang, route, **fields)
        assert await chat(sglang, session, **fields) == expected != base
    for refused in ({"no_stop_trim": True}, {"custom_logit_processor": "00"}):
        answers = [await sglang.post(path, json={**BODY, **refused}) for path in (route, session)]
        assert answers[0].status_code == answers[1].status_code >= 400
    assert [turn["model"] for turn in (await trajectory(sglang, "a"))["turns"]] == ["three", "three"]
