"""The calls that SkyRL 0.4.0 adds to vLLM's weight transfer: sleep around an update, and adapters as tensors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine
from drivetrain.types.modes import MemoryTag
from engines import until_running
from trainer_groups import Group, Tensor, answers_of, fresh, rpc, same, send_as_trl, tensors_of, version_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
PACKED = {"packed": True}


async def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(answer: httpx.Response, status: int, text: str) -> None:
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]["message"]


async def update(group: Group, folder: Path, tensors: list[Tensor]) -> httpx.Response:
    """Send one update as vLLM's sender does, and return the answer to its end."""
    (client,) = group.clients
    await ok(await client.post("/start_weight_update"))
    answer, error = await send_as_trl(group, folder, tensors, **PACKED)
    assert (answer.status_code, error) == (200, ""), answer.text
    return await client.post("/finish_weight_update")


def target_of(folder: Path, name: str = "adapter", **more: object) -> dict[str, object]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return {"kind": "lora", "lora_name": name, "adapter_config": config, "aliases": {}, **more}


@pytest_asyncio.fixture(loop_scope="session")
async def unloaded(transfer: Group) -> AsyncIterator[Group]:
    """A group whose server has no adapters from tensors afterwards."""
    yield transfer
    (client,) = transfer.clients
    await client.post("/v1/unload_lora_adapter", json={"lora_name": "adapter"})
    await rpc(client, "skyrl_discard_in_memory_lora", lora_name="adapter")


# Sleep around an update ----------------------------------------------------------------------------------------------


async def test_requests_outlast_a_sleep_around_an_update(
    transfer: Group, engine: InferenceEngine, other_model: Path
) -> None:
    (client,) = transfer.clients
    running = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await until_running(engine, 1)
    await ok(await client.post("/pause?mode=keep&clear_cache=false"))
    slept = await ok(await rpc(client, "skyrl_sleep_for_weight_sync", offload_kv=True))
    assert slept == {"results": [None]}
    assert engine.status.asleep == {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
    await ok(await rpc(client, "skyrl_wake_for_weight_sync", tags=["weights"]))
    assert engine.status.asleep == {MemoryTag.KV_CACHE}
    await ok(await update(transfer, other_model, tensors_of(other_model)))
    await ok(await rpc(client, "skyrl_wake_for_weight_sync", tags=["kv_cache"]))
    assert engine.is_paused, "only /resume lets requests go on"
    assert not running.done()
    await ok(await client.post("/resume"))
    (choice,) = (await ok(await running))["choices"]
    assert len(choice["token_ids"]) == 400
    assert same(await answers_of(client), await fresh(other_model))


async def test_an_engine_without_its_new_weights_does_not_go_on(transfer: Group, engine: InferenceEngine) -> None:
    (client,) = transfer.clients
    await ok(await client.post("/pause?mode=keep&clear_cache=false"))
    await ok(await rpc(client, "skyrl_sleep_for_weight_sync", offload_kv=False))
    await ok(await rpc(client, "skyrl_wake_for_weight_sync", tags=["weights", "kv_cache"]))
    answer = await client.post("/resume")
    assert answer.status_code == 503, answer.text
    assert "push a complete weight update first" in answer.json()["error"]


async def test_a_sleep_that_cannot_be_is_refused_and_changes_nothing(
    with_gpu: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    before = engine.status
    await refused(await rpc(with_gpu, "skyrl_sleep_for_weight_sync", offload_kv=True), 400, "in a pause only")
    await refused(await rpc(with_gpu, "skyrl_sleep_for_weight_sync", offload_kv="no"), 400, "offload_kv='no'")
    await refused(await rpc(with_gpu, "skyrl_wake_for_weight_sync", tags=["graphs"]), 400, "tags=['graphs']")
    await refused(await rpc(with_gpu, "skyrl_wake_for_weight_sync", tags="weights"), 400, "tags='weights'")
    await refused(await rpc(with_gpu, "skyrl_wake_for_weight_sync", tags=[["weights"]]), 400, "tags=[['weights']]")
    assert engine.status == before


# Adapters as tensors -------------------------------------------------------------------------------------------------


async def test_an_adapter_comes_by_the_weight_transfer(unloaded: Group, adapters: Path) -> None:
    (client,) = unloaded.clients
    base, version = await answers_of(client), await version_of(client)
    found = []
    for name in ("one", "two", "one"):
        folder = adapters / name
        await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target_of(folder)))
        await ok(await update(unloaded, folder, tensors_of(folder)))
        assert await version_of(client) == version, "nothing is served before the load"
        body = {"lora_name": "adapter", "in_memory": True}
        loaded = await ok(await client.post("/skyrl/v1/load_lora_adapter", json=body))
        assert loaded == {"status": "ok", "lora_name": "adapter", "lora_int_id": None}
        version = await version_of(client)
        await ok(await client.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "f", "lora_path": str(folder)}))
        found.append(await answers_of(client, "adapter"))
        assert same(found[-1], await answers_of(client, "f")), "the tensors are those of the folder"
        version = await version_of(client)
    assert found[0] != found[1]
    assert same(found[0], found[2])
    assert not same(found[0], base)
    assert same(await answers_of(client), base)
    for name in ("adapter", "f"):
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200
    for dropped in (True, False):
        discarded = await rpc(client, "skyrl_discard_in_memory_lora", lora_name="adapter")
        assert await ok(discarded) == {"results": [dropped]}
    await refused(
        await client.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "adapter", "in_memory": True}),
        400,
        "no tensors of the adapter 'adapter' have come",
    )


async def test_an_adapter_is_loaded_in_a_pause(unloaded: Group, engine: InferenceEngine, adapters: Path) -> None:
    (client,) = unloaded.clients
    load = {"lora_name": "adapter", "in_memory": True}
    for name in ("one", "two"):
        folder = adapters / name
        running = asyncio.create_task(client.post("/v1/completions", json=LONG))
        await until_running(engine, 1)
        await ok(await client.post("/pause?mode=keep&clear_cache=false"))
        await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target_of(folder)))
        await ok(await update(unloaded, folder, tensors_of(folder)))
        await ok(await client.post("/skyrl/v1/load_lora_adapter", json=load))
        await ok(await client.post("/resume"))
        assert len((await ok(await running))["choices"][0]["token_ids"]) == 400
    running = asyncio.create_task(client.post("/v1/completions", json={**LONG, "model": "adapter"}))
    await until_running(engine, 1)
    await ok(await client.post("/pause?mode=keep&clear_cache=false"))
    held = await client.post("/skyrl/v1/load_lora_adapter", json=load)
    await ok(await client.post("/resume"))
    await refused(held, 503, "is used by 1 requests in flight")
    assert len((await ok(await running))["choices"][0]["token_ids"]) == 400


async def test_aliases_name_tensors_that_are_not_sent(unloaded: Group, adapters: Path) -> None:
    (client,) = unloaded.clients
    folder = adapters / "one"
    tensors = tensors_of(folder)
    (dropped, *_) = [one for one in tensors if "layers.1." in one["name"]]
    kept = dropped["name"].replace("layers.1.", "layers.0.")
    sent = [one for one in tensors if one is not dropped]
    target = target_of(folder, aliases={dropped["name"]: kept})
    await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target))
    await ok(await update(unloaded, folder, sent))
    await ok(await client.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "adapter", "in_memory": True}))
    short = await answers_of(client, "adapter")
    whole = [{**one, "of": kept} if one is dropped else one for one in tensors]
    await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target_of(folder)))
    await ok(await update(unloaded, folder, whole))
    await ok(await client.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "adapter", "in_memory": True}))
    assert same(short, await answers_of(client, "adapter"))


async def test_an_expected_adapter_holds_for_one_update(unloaded: Group, adapters: Path, other_model: Path) -> None:
    (client,) = unloaded.clients
    before = await answers_of(client)
    folder = adapters / "one"
    await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target_of(folder)))
    await refused(await client.post("/finish_weight_update"), 400, "no update is open")
    for tensors, target, text in (
        ([], target_of(folder), "brought no tensors"),
        (tensors_of(folder), target_of(folder, aliases={"a": "absent"}), "aliases name 'absent'"),
    ):
        await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target))
        await refused(await update(unloaded, folder, tensors), 400, text)
    await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target_of(folder)))
    await ok(await client.post("/start_weight_update"))
    tensors = tensors_of(folder)
    for status in (200, 400):
        answer, error = await send_as_trl(unloaded, folder, tensors, **PACKED)
        assert (answer.status_code, error) == (status, ""), "a tensor that came twice is received all the same"
    await refused(await client.post("/finish_weight_update"), 400, "came twice")
    assert same(await answers_of(client), before)
    await ok(await update(unloaded, other_model, tensors_of(other_model)))
    assert same(await answers_of(client), await fresh(other_model)), "the next update is one of all weights"


async def test_what_is_no_adapter_is_refused_before_any_tensor_comes(
    unloaded: Group, adapters: Path, other_model: Path
) -> None:
    (client,) = unloaded.clients
    target = target_of(adapters / "one")
    for wrong, text in (
        (None, "expected an object of kind 'lora'"),
        ({**target, "kind": "full"}, "expected an object of kind 'lora'"),
        ({**target, "more": 1}, "expected an object of kind 'lora'"),
        ({**target, "lora_name": ""}, "lora_name=''"),
        ({**target, "lora_name": "policy"}, "the name of the model itself"),
        ({**target, "adapter_config": []}, "adapter_config=[]"),
        ({**target, "aliases": {"a": 1}}, "aliases="),
    ):
        answer = await rpc(client, "skyrl_set_lora_receive_target", receive_target=wrong)
        await refused(answer, 400, text)
    await ok(await client.post("/start_weight_update"))
    await refused(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target), 400, "an update is open")
    answer, _ = await send_as_trl(unloaded, other_model, tensors_of(other_model), **PACKED)
    await ok(answer)
    await ok(await client.post("/finish_weight_update"))
    for _ in range(2):
        await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target))
    other = {**target, "lora_name": "other"}
    await refused(
        await rpc(client, "skyrl_set_lora_receive_target", receive_target=other), 400, "'adapter' is expected"
    )
    both = {"lora_name": "adapter", "in_memory": True, "lora_path": str(adapters / "one")}
    await refused(await client.post("/skyrl/v1/load_lora_adapter", json=both), 400, "not both")


async def test_a_trainer_that_sends_before_it_begins_is_let_go(unloaded: Group, adapters: Path) -> None:
    (client,) = unloaded.clients
    folder = adapters / "one"
    await ok(await rpc(client, "skyrl_set_lora_receive_target", receive_target=target_of(folder)))
    answer, _ = await send_as_trl(unloaded, folder, tensors_of(folder), **PACKED)
    await refused(answer, 400, "no update was started")
    assert (await client.post("/shutdown_weight_transfer_engine")).status_code == 400, "nobody waits in a broadcast"


# Other transfers of SkyRL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"base_model_path": "m", "local_checkpoint_dir": "/d"}, "deltas of a checkpoint"),
        ({"trainer_actor_names": ["a"], "replica_rank": 0, "num_replicas": 1}, "pulls by RDMA"),
        ({"packed": True}, "handles of GPU memory"),
    ],
    ids=["delta", "sharded_rdt", "ipc"],
)
async def test_other_transfers_are_refused(with_gpu: httpx.AsyncClient, info: dict[str, object], text: str) -> None:
    await refused(await with_gpu.post("/init_weight_transfer_engine", json={"init_info": info}), 501, text)


async def test_handles_and_deltas_are_refused(with_gpu: httpx.AsyncClient) -> None:
    handles = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles_pickled": "gASV"}
    await refused(await with_gpu.post("/update_weights", json={"update_info": handles}), 501, "unpickles nothing")
    await refused(await with_gpu.post("/fetch_weights", json={"target_version": 1}), 501, "deltas of a checkpoint")
    await refused(await with_gpu.post("/start_draft_weight_update"), 501, "draft models")


async def test_a_wrong_buffer_size_is_named_by_its_place(with_gpu: httpx.AsyncClient) -> None:
    info = {"names": [], "dtype_names": [], "shapes": [], "packed": True, "packed_buffer_size_bytes": -1}
    answer = await with_gpu.post("/update_weights", json={"update_info": info})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "update_info.packed_buffer_size_bytes")
