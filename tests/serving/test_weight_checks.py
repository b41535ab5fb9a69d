"""Checksums, snapshots and resets of the served weights, as vLLM's and SGLang's clients ask for them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from drivetrain import InferenceEngine, create_engine
from drivetrain.types.weights import TensorSpec
from drivetrain_fleet import Health, InferenceEngineClient
from drivetrain_serving.weight_checks import random_values
from scripted_backend import scripted_engine
from trainer_groups import Trainer, a_client, a_group, answers_of, fresh, same, tensors_of, version_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

RANK = "dp0:pp0:pcp0:tp0:"
"""The name by which vLLM calls the only rank."""


@pytest_asyncio.fixture(loop_scope="session")
async def initial(engine: InferenceEngine, model: Path) -> AsyncIterator[InferenceEngine]:
    """The session's engine, which serves ``model`` again afterwards."""
    yield engine
    await engine.load_weights_from_disk(str(model), "initial")


async def check(client: httpx.AsyncClient, action: str, status: int = 200, **more: object) -> Any:
    """Ask SGLang's route."""
    response = await client.post("/weights_checker", json={"action": action, **more})
    assert response.status_code == status, response.text
    assert response.json()["success"] is (status == 200)
    return response.json()


async def changed(client: httpx.AsyncClient) -> list[str]:
    """Return the names of the tensors that differ from the snapshot."""
    message = (await check(client, "compare", 400))["message"]
    return str(message).removeprefix("these tensors differ from the snapshot: ").split(", ")


async def ask_vllm(client: httpx.AsyncClient, action: str, **more: object) -> Any:
    response = await client.post("/weight_checker", json={"action": action, **more})
    assert response.status_code == 200, response.text
    return response.json()


async def test_checksums_are_those_of_the_checkpoints_bytes(
    client: httpx.AsyncClient, initial: InferenceEngine, model: Path, other_model: Path
) -> None:
    first = (await ask_vllm(client, "checksum"))["checksums"]
    for folder in (model, other_model):
        await initial.load_weights_from_disk(str(folder), folder.name)
        files = load_file(folder / "model.safetensors")
        expected = {name: hashlib.sha256(bytes(one.flatten().numpy())).hexdigest() for name, one in files.items()}
        (engine,) = (await check(client, "checksum"))["ranks"]
        assert engine["checksums"] == expected
        assert (await ask_vllm(client, "checksum"))["checksums"] == {RANK + name: one for name, one in expected.items()}
        compared = await ask_vllm(client, "compare", baseline=first)
        assert compared["match"] is (folder == model)
        assert set(compared["mismatches"]) == {
            name for name, one in first.items() if one != expected[name[len(RANK) :]]
        }
    assert (await ask_vllm(client, "compare", baseline={}))["mismatches"] == sorted(first)


async def test_the_checksum_of_an_engine_follows_each_tensor(
    client: httpx.AsyncClient, initial: InferenceEngine, other_model: Path
) -> None:
    before = await check(client, "checksum")
    assert (await check(client, "checksum")) == before
    without = await check(client, "checksum", skip_tensor_list=["norm"])
    assert without["per_engine_checksum"] != before["per_engine_checksum"]
    assert not any("norm" in name for name in without["ranks"][0]["checksums"])
    await initial.load_weights_from_disk(str(other_model), "other")
    assert (await check(client, "checksum"))["per_engine_checksum"] != before["per_engine_checksum"]


async def test_weights_that_were_reset_are_whole_again_after_an_update(
    trainer: Trainer, client: httpx.AsyncClient, initial: InferenceEngine, model: Path
) -> None:
    """The sequence of slime's ``--check-weight-update-equal``."""
    await check(client, "snapshot")
    await check(client, "reset_tensors")
    assert await version_of(client) == "reset"
    assert not same(await answers_of(client), await fresh(model))
    assert await changed(client) == sorted(one["name"] for one in tensors_of(model))
    async with a_group(trainer, client) as group:
        await group.send_all(model, tensors_of(model), weight_version="1")
    await check(client, "compare")
    assert same(await answers_of(client), await fresh(model))
    await check(client, "compare", 400)  # the snapshot was that of one comparison


async def test_vllms_reset_is_undone_by_an_update(
    client: httpx.AsyncClient, initial: InferenceEngine, model: Path
) -> None:
    baseline = (await ask_vllm(client, "checksum"))["checksums"]
    assert await ask_vllm(client, "reset") == {"status": "reset"}
    assert (await ask_vllm(client, "compare", baseline=baseline))["match"] is False
    await initial.load_weights_from_disk(str(model), "again")
    assert await ask_vllm(client, "compare", baseline=baseline) == {"match": True, "mismatches": []}


async def test_tensors_that_are_left_out_are_neither_reset_nor_compared(
    client: httpx.AsyncClient, initial: InferenceEngine
) -> None:
    await check(client, "snapshot")
    await check(client, "reset_tensors", skip_tensor_list=["layers", "embed_tokens"])
    assert await changed(client) == ["lm_head.weight", "model.norm.weight"]
    await check(client, "compare", skip_tensor_list=["head", "norm"])


async def test_an_open_update_is_not_reset(
    trainer: Trainer, client: httpx.AsyncClient, initial: InferenceEngine, model: Path
) -> None:
    async with a_group(trainer, client) as group:
        await group.send(model, tensors_of(model)[:1])
        assert "an update is open" in (await check(client, "reset_tensors", 400))["message"]
    assert await version_of(client) == "initial"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"action": "sum"}, "action='sum'"),
        ({"action": "compare"}, "snapshot"),
        ({"skip_tensor_list": "norm"}, "skip_tensor_list"),
        ({"skip_tensor_list": [3]}, "skip_tensor_list"),
        ({"selector": "draft"}, "selector"),
    ],
)
async def test_wrong_checks_are_refused_by_name(
    client: httpx.AsyncClient, initial: InferenceEngine, wrong: dict[str, object], named: str
) -> None:
    response = await client.post("/weights_checker", json=wrong)
    assert response.status_code == 400
    assert named in response.json()["message"]
    assert await version_of(client) == "initial"


async def test_vllms_comparison_needs_a_baseline(client: httpx.AsyncClient, initial: InferenceEngine) -> None:
    for body in ({"action": "compare"}, {"action": "compare", "baseline": None}, {"action": "snapshot"}, {}):
        assert (await client.post("/weight_checker", json=body)).status_code == 400
    for action in ("checksum", "reset", "compare"):
        for baseline in ([1], "a", 0, False, {"a": 1}, {"a": None}):
            response = await client.post("/weight_checker", json={"action": action, "baseline": baseline})
            assert response.status_code == 400
            assert "baseline=" in response.text
    assert await version_of(client) == "initial"
    assert (await ask_vllm(client, "checksum", baseline=None))["checksums"]


async def test_each_engine_of_a_fleet_is_checked(model: Path, other_model: Path) -> None:
    async with (
        create_engine("transformers", model=str(model)) as one,
        create_engine("transformers", model=str(model)) as two,
        InferenceEngineClient([one, two]) as fleet,
        a_client(fleet) as client,
    ):
        checked = (await check(client, "checksum"))["ranks"]
        assert [each["parallelism_info"]["dp_rank"] for each in checked] == [0, 1]
        assert checked[0]["per_gpu_checksum"] == checked[1]["per_gpu_checksum"]
        await check(client, "snapshot")
        await check(client, "reset_tensors")
        await fleet.load_weights_from_disk(str(model), "again")
        await check(client, "compare")
        baseline = (await ask_vllm(client, "checksum"))["checksums"]
        await two.load_weights_from_disk(str(other_model), "behind the fleet")
        mismatches = (await ask_vllm(client, "compare", baseline=baseline))["mismatches"]
        assert mismatches
        assert all(name.startswith("dp1:") for name in mismatches)


async def test_a_lost_engine_of_a_fleet_is_left_out(model: Path) -> None:
    async with (
        create_engine("transformers", model=str(model)) as one,
        create_engine("transformers", model=str(model)) as two,
        InferenceEngineClient({"one": one, "two": two}) as fleet,
        a_client(fleet) as client,
    ):
        await check(client, "snapshot")
        await one.teardown()
        assert {member.name: member.health for member in fleet.members}["one"] is Health.FAILED
        assert len((await check(client, "checksum"))["ranks"]) == 1
        assert {name.split(":")[0] for name in (await ask_vllm(client, "checksum"))["checksums"]} == {"dp0"}
        refused = (await check(client, "compare", 400))["message"]
        assert "the snapshot is of one, two, and the fleet now has two" in refused
        async with create_engine("transformers", model=str(model)) as three:
            await fleet.add(three, "three")
            refused = (await check(client, "compare", 400))["message"]
            assert "the fleet now has three, two" in refused
            await check(client, "snapshot")
            await check(client, "compare")


async def test_two_comparisons_at_once_are_both_answered(client: httpx.AsyncClient, initial: InferenceEngine) -> None:
    await check(client, "snapshot")
    await asyncio.gather(check(client, "compare"), check(client, "compare"))
    await check(client, "compare", 400)


async def test_random_booleans_are_of_both_values() -> None:
    values = random_values(TensorSpec(name="mask", dtype="bool", shape=(64, 4)))
    assert values.dtype is torch.bool
    assert {*values.flatten().tolist()} == {False, True}


@pytest.mark.parametrize("action", ["checksum", "snapshot", "reset_tensors", "reset"])
async def test_an_engine_that_cannot_read_its_weights_refuses(model: Path, tmp_path: Path, action: str) -> None:
    async with scripted_engine(model, tmp_path / "model") as (engine, _), a_client(engine) as client:
        if action != "reset":
            await check(client, action, 400)
        if action in ("checksum", "reset"):
            assert (await client.post("/weight_checker", json={"action": action})).status_code == 501
