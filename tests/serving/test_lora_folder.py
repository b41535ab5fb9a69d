"""Adapters of a folder, loaded by the requests that name them, behind an engine with room for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, create_engine
from drivetrain_serving import Server, ServerConfig
from engines import until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

Served = tuple[InferenceEngine, httpx.AsyncClient]


@pytest_asyncio.fixture(loop_scope="session")
async def small(model: Path, adapters: Path) -> AsyncIterator[Served]:
    async with (
        create_engine("transformers", model=str(model), enable_lora=True, max_loras=1) as engine,
        Server(engine, ServerConfig(port=0, lora_folder=str(adapters))) as server,
        httpx.AsyncClient(base_url=server.url, timeout=240) as client,
    ):
        yield engine, client


async def completed(client: httpx.AsyncClient, model: str, tokens: int = 8) -> Any:
    body = {"model": model, "prompt": [5, 6], "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    response = await client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def names(client: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"][1:]]


async def test_an_adapter_takes_the_place_of_another(small: Served) -> None:
    _, client = small
    answers = []
    for name in ("one", "two", "one", "two"):
        answers.append(await completed(client, name))
        assert await names(client) == [name]
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


async def test_an_adapter_in_use_is_waited_for(small: Served) -> None:
    engine, client = small
    alone = await completed(client, "one", 200)
    running = asyncio.create_task(completed(client, "one", 200))
    await until_running(engine, 1)
    other = asyncio.create_task(completed(client, "two"))
    assert await running == alone
    assert len(await other) == 8
    assert await names(client) == ["two"]


async def test_an_adapter_loaded_by_a_route_stays(small: Served, adapters: Path) -> None:
    engine, client = small
    body = {"lora_name": "kept", "lora_path": str(adapters / "one")}
    assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    refused = await client.post("/v1/completions", json={"model": "two", "prompt": [5]})
    assert refused.status_code == 400
    assert "max_loras=1" in refused.json()["error"]["message"]
    assert refused.json()["drivetrain"]["error"] == "TooManyAdapters"
    assert await names(client) == ["kept"]
    again = {**body, "lora_name": "another"}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        refused = await client.post(path, json=again)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")
        assert refused.json()["drivetrain"]["error"] == "TooManyAdapters"
    async with Server(engine, ServerConfig(port=0, dialect="sglang")) as server:
        refused = await client.post(f"{server.url}/load_lora_adapter", json=again)
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert refused.json()["drivetrain"]["error"] == "TooManyAdapters"
    assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "kept"})).status_code == 200
    assert len(await completed(client, "two")) == 8


async def test_an_adapter_that_a_route_loads_anew_stays(small: Served, adapters: Path) -> None:
    _, client = small
    assert len(await completed(client, "one")) == 8
    body = {"lora_name": "one", "lora_path": str(adapters / "two")}
    assert (await client.post("/load_lora_adapter", json=body)).status_code == 200
    refused = await client.post("/v1/completions", json={"model": "two", "prompt": [5]})
    assert (refused.status_code, refused.json()["drivetrain"]["error"]) == (400, "TooManyAdapters")
    assert await names(client) == ["one"]
    assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})).status_code == 200


async def test_an_unknown_model_is_answered_with_ten_names_at_most(served: InferenceEngine) -> None:
    for count, said in ((10, "'name-8', 'name-9'."), (12, "'name-8', 'name-9' and 2 more.")):
        config = ServerConfig(port=0, served_model_name=tuple(f"name-{number}" for number in range(count)))
        async with Server(served, config) as server, httpx.AsyncClient(base_url=server.url) as client:
            answer = await client.post("/v1/completions", json={"model": "unknown", "prompt": [5]})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message.startswith("The model 'unknown' does not exist. Served: 'name-0', 'name-1', ")
        assert message.endswith(said)
