"""Weights over NCCL, from a trainer on the second GPU to a server on the first. Needs two GPUs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from drivetrain import create_engine
from drivetrain_serving.vllm.weight_transfer import GROUP
from trainer_groups import (
    Group,
    Trainer,
    a_client,
    a_group,
    a_trainer,
    answers_of,
    free_port,
    fresh,
    must_join,
    send_as_trl,
    tensors_of,
    version_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def trainer() -> AsyncIterator[Trainer]:
    async with a_trainer(CUDA_VISIBLE_DEVICES="1") as trainer:
        yield trainer


@pytest_asyncio.fixture(loop_scope="session")
async def client(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with create_engine("transformers", model=str(model)) as engine, a_client(engine) as client:
        yield client


async def require_served(client: httpx.AsyncClient, folder: Path) -> None:
    """Compare with a fresh engine, which runs on the same GPU."""
    (tokens, logprobs), expected = await answers_of(client), await fresh(folder)
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_a_torch_group(
    trainer: Trainer, client: httpx.AsyncClient, model: Path, other_model: Path, load_format: str | None
) -> None:
    async with a_group(trainer, client, backend="nccl") as group:
        for folder in (other_model, model):
            await group.send_all(folder, tensors_of(folder), weight_version=folder.name, load_format=load_format)
            assert await version_of(client) == folder.name
            await require_served(client, folder)
        tensors = tensors_of(other_model)
        answer, error = await group.send(other_model, [{**tensors[0], "name": "absent"}])
        assert (answer.status_code, error) == (400, ""), answer.text
        await group.send_all(other_model, tensors)
        await require_served(client, other_model)


async def test_vllms_communicator(trainer: Trainer, client: httpx.AsyncClient, model: Path, other_model: Path) -> None:
    port = free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
    await must_join(
        trainer.do("join_communicator", address="127.0.0.1", port=port, world_size=2, group=GROUP),
        client.post("/init_weight_transfer_engine", json={"init_info": info}),
    )
    group = Group(GROUP, trainer, [client])
    for folder, packing in (
        (other_model, {"packed": True, "packed_buffer_size_bytes": 200_000}),
        (model, {"packed": False}),
    ):
        assert (await client.post("/start_weight_update", json={})).status_code == 200
        answer, error = await send_as_trl(group, folder, tensors_of(folder), **packing)
        assert (answer.status_code, error) == (200, ""), answer.text
        finished = await client.post("/finish_weight_update", json={"weight_version": folder.name})
        assert finished.status_code == 200, finished.text
        await require_served(client, folder)
    assert (await client.post("/shutdown_weight_transfer_engine")).status_code == 200
