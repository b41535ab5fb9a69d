"""The calls of a training step as slime and AReaL make them, weights included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine
from engines import HANGING, until_running
from trainer_groups import Group, Trainer, a_group, fresh, tensors_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="session")
async def group(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine, model: Path
) -> AsyncIterator[Group]:
    async with a_group(trainer, client) as group:
        yield group
    await engine.load_weights_from_disk(str(model), "initial")
    await engine.continue_generation()


async def ok(client: httpx.AsyncClient, path: str, **body: object) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def generated(client: httpx.AsyncClient, **params: object) -> Any:
    return await ok(client, "/generate", input_ids=[5, 6, 7], sampling_params={**GREEDY, **params}, return_logprob=True)


async def test_a_step_of_slime(
    group: Group, client: httpx.AsyncClient, engine: InferenceEngine, other_model: Path
) -> None:
    info = (await client.get("/server_info")).json()
    assert info["tp_size"] * info["pp_size"] == 1, "the ranks that slime counts for this server"
    running = asyncio.create_task(generated(client, max_new_tokens=400))
    await until_running(engine, 1)
    await ok(client, "/pause_generation")
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.get("/flush_cache")).status_code == 200
    await group.send_all(other_model, tensors_of(other_model), weight_version="1", flush_cache=False)
    waiting = asyncio.create_task(generated(client))
    await ok(client, "/continue_generation")
    expected = await fresh(other_model)
    for answer in (await waiting, await generated(client)):
        assert answer["output_ids"] == expected[0]
        assert answer["meta_info"]["weight_version"] == "1"
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx(expected[1], abs=1e-5)


async def test_a_step_of_areal(
    group: Group, client: httpx.AsyncClient, engine: InferenceEngine, other_model: Path
) -> None:
    running = asyncio.create_task(generated(client, max_new_tokens=400))
    await until_running(engine, 1)
    await ok(client, "/pause_generation")
    await ok(client, "/pause_generation", mode="in_place")
    partial = await running
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    await group.send_all(other_model, tensors_of(other_model), abort_all_requests=True)
    await ok(client, "/continue_generation")
    answer = await generated(client)
    assert answer["output_ids"] == (await fresh(other_model))[0]
    assert answer["meta_info"]["weight_version"].isdecimal()


async def test_nothing_goes_on_while_tensors_are_missing(
    group: Group, client: httpx.AsyncClient, engine: InferenceEngine, other_model: Path
) -> None:
    await ok(client, "/pause_generation")
    tensors = tensors_of(other_model)
    await group.send_all(other_model, tensors[:-1], weight_version="2")
    for _ in range(2):
        refused = await client.post("/continue_generation", json={})
        assert refused.status_code == 400, refused.text
        assert tensors[-1]["name"] in refused.json()["error"]["message"]
        assert engine.is_paused
    waiting = asyncio.create_task(generated(client))
    await group.send_all(other_model, tensors, weight_version="2")
    await ok(client, "/continue_generation")
    async with asyncio.timeout(HANGING):
        answer = await waiting
    assert answer["meta_info"]["weight_version"] == "2"
    assert answer["output_ids"] == (await fresh(other_model))[0]


async def test_a_folder_takes_the_place_of_missing_tensors(
    group: Group, client: httpx.AsyncClient, engine: InferenceEngine, other_model: Path
) -> None:
    await ok(client, "/pause_generation")
    await group.send_all(other_model, tensors_of(other_model)[:-1])
    await ok(client, "/update_weights_from_disk", model_path=str(other_model), weight_version="folder")
    await ok(client, "/continue_generation")
    assert (await generated(client))["output_ids"] == (await fresh(other_model))[0]
