"""Weights that a trainer broadcasts to a server on one rank and on two: ``make test-weight-groups BACKEND=sglang``.

Run in the environment that holds the engine. One process of the server receives, and hands on to each rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from safetensors.torch import load_file

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from trainer_groups import Trainer, a_client, a_group, a_trainer, answers_of, fresh, tensors_of, version_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKEND: Final = os.environ["BACKEND"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer() -> AsyncIterator[Trainer]:
    async with a_trainer() as trainer:
        yield trainer


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["one rank", "two ranks"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "context_length": 256, "tensor_parallel_size": request.param}
    async with create_engine(BACKEND, model=str(tiny_model("qwen2")), **sizes) as engine, a_client(engine) as client:
        yield client


async def require_answers_of(folder: Path, client: httpx.AsyncClient) -> None:
    """Require the answer that transformers alone gives with these weights, within the engines' rounding."""
    ids, logprobs = await answers_of(client)
    expected_ids, expected = await fresh(folder)
    assert ids == expected_ids
    assert logprobs == pytest.approx(expected, abs=1e-3)


def checksums_of(folder: Path) -> dict[str, str]:
    files = load_file(folder / "model.safetensors")
    return {name: hashlib.sha256(bytes(one.flatten().numpy())).hexdigest() for name, one in files.items()}


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_each_rank_serves_what_the_trainer_broadcast(
    trainer: Trainer, client: httpx.AsyncClient, load_format: str | None
) -> None:
    async with a_group(trainer, client) as group:
        for version, seed in (("1", 1), ("2", 0)):
            folder = tiny_model("qwen2", seed=seed)
            await group.send_all(folder, tensors_of(folder), weight_version=version, load_format=load_format)
            await require_answers_of(folder, client)
            assert await version_of(client) == version
            checked = await client.post("/weights_checker", json={"action": "checksum"})
            assert checked.status_code == 200, checked.text
            assert checked.json()["ranks"][0]["checksums"] == checksums_of(folder)


async def test_each_rank_keeps_its_weights_when_a_broadcast_is_refused(
    trainer: Trainer, client: httpx.AsyncClient
) -> None:
    folder = tiny_model("qwen2", seed=1)
    first, *rest = tensors_of(folder)
    async with a_group(trainer, client) as group:
        await group.send_all(folder, [first, *rest], weight_version="3")
        refused = {**first, "shape": [1, *first["shape"]]}
        answer, error = await group.send(folder, [refused], sent=[first])
        assert (answer.status_code, error) == (400, ""), answer.text
        await require_answers_of(folder, client)
        assert await version_of(client) == "3"
        await group.send_all(folder, [first, *rest], weight_version="4")
        assert await version_of(client) == "4"
