"""vLLM's weight transfer: the rendezvous, the chunks, and the routes. NCCL itself needs two GPUs."""

from __future__ import annotations

import asyncio
import ctypes
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch.distributed

from drivetrain import InvalidRequest, create_engine
from drivetrain.types.weights import TensorSpec
from drivetrain_serving.vllm.weight_transfer import GROUP
from drivetrain_weight_sync.trainer_groups.bucket import WHOLE, WeightBucket
from drivetrain_weight_sync.trainer_groups.bucket_layout import BucketLayout
from drivetrain_weight_sync.trainer_groups.nccl import id_from_pickle, id_from_store
from drivetrain_weight_sync.trainer_groups.process_messages import JoinNccl
from drivetrain_weight_sync.trainer_groups.refused_rendezvous import release_trainer
from engines import HANGING
from trainer_groups import (
    Group,
    Trainer,
    a_client,
    a_group,
    a_rank_0,
    answers_of,
    free_port,
    fresh,
    require_released,
    rpc,
    same,
    send_as_skyrl,
    send_as_trl,
    tensors_of,
    version_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

IDENTITY = bytes(range(1, 129))


def pickled_id(monkeypatch: pytest.MonkeyPatch, protocol: int | None = None) -> bytes:
    """Pickle an id as vLLM's ``StatelessProcessGroup`` does, by a class of the same full name."""
    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    module = ModuleType(name)

    class ncclUniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = name, "ncclUniqueId"
    module.ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
    parts = name.split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    monkeypatch.setitem(sys.modules, name, module)
    return pickle.dumps(ncclUniqueId.from_buffer_copy(IDENTITY), protocol)


@pytest.mark.parametrize("protocol", [None, 4, 5])
async def test_the_id_is_read_off_its_pickle(monkeypatch: pytest.MonkeyPatch, protocol: int | None) -> None:
    assert id_from_pickle(pickled_id(monkeypatch, protocol)) == IDENTITY


@pytest.mark.parametrize(
    "data", [b"", b"no pickle", pickle.dumps(IDENTITY), pickle.dumps([IDENTITY, "ncclUniqueId", b""]), IDENTITY]
)
async def test_other_data_is_no_id(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no NCCL id"):
        id_from_pickle(data)


async def test_the_id_comes_from_the_trainers_store(monkeypatch: pytest.MonkeyPatch) -> None:
    # As vLLM makes it: without libuv, and waiting in its constructor until every rank has connected.
    dist: Any = torch.distributed
    timeout = timedelta(seconds=HANGING)
    hosting = asyncio.create_task(
        asyncio.to_thread(dist.TCPStore, "127.0.0.1", port := free_port(), 2, True, timeout, use_libuv=False)
    )
    join = JoinNccl(
        group_name=GROUP, rank=1, world_size=2, timeout=HANGING, master_address="127.0.0.1", master_port=port
    )
    asking = asyncio.create_task(asyncio.to_thread(id_from_store, join))
    async with asyncio.timeout(HANGING):
        store = await hosting
        store.set("broadcast_from/0/0", pickled_id(monkeypatch))
        assert await asking == IDENTITY


async def test_a_chunk_ends_with_the_tensor_that_exceeds_the_buffer() -> None:
    sizes = [40, 60, 1, 100, 101, 3]
    specs = tuple(TensorSpec(str(index), "uint8", (size,)) for index, size in enumerate(sizes))
    layout = BucketLayout(WeightBucket("g", specs, 100))
    assert [(piece.dtype, piece.shape, piece.offset) for piece in layout.pieces] == [
        ("uint8", (101,), 0),
        ("uint8", (201,), 101),
        ("uint8", (3,), 302),
    ]
    assert len(BucketLayout(WeightBucket("g", specs, WHOLE)).pieces) == 1
    assert len(BucketLayout(WeightBucket("g", specs, None)).pieces) == len(sizes)
    assert BucketLayout(WeightBucket("g", (), WHOLE)).pieces == []


async def test_a_tensor_at_an_odd_offset_is_read() -> None:
    specs = (TensorSpec("a", "uint8", (3,)), TensorSpec("b", "bfloat16", (2, 2)), TensorSpec("c", "float32", (0, 4)))
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=torch.bfloat16)
    memory = torch.cat([torch.tensor([7, 8, 9], dtype=torch.uint8), values.flatten().view(torch.uint8)])
    found = BucketLayout(WeightBucket("g", specs, WHOLE)).tensors(memory)
    assert found["a"].tolist() == [7, 8, 9]
    assert torch.equal(found["b"], values)
    assert found["c"].shape == (0, 4)


# Routes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [{}, {"packed": True, "packed_buffer_size_bytes": 200_000}], ids=["each", "packed"])
async def test_an_update_is_served_when_it_is_finished(
    transfer: Group, other_model: Path, info: dict[str, object]
) -> None:
    (client,) = transfer.clients
    assert (await client.get("/server_info")).json()["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}
    assert (await client.post("/finish_weight_update")).status_code == 400, "no update has begun"
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    assert (await client.post("/start_weight_update", json={})).json()["message"]
    assert (await client.post("/start_weight_update")).status_code == 400
    for part in (tensors[:9], tensors[9:]):
        answer, error = await send_as_trl(transfer, other_model, part, **info)
        assert (answer.status_code, error) == (200, ""), answer.text
    assert same(await answers_of(client), before)
    finished = await client.post("/finish_weight_update", json={"weight_version": "step-4"})
    assert finished.status_code == 200, finished.text
    assert await version_of(client) == "step-4"
    assert same(await answers_of(client), await fresh(other_model))
    assert (await client.post("/finish_weight_update")).status_code == 400


@pytest.mark.parametrize("info", [{}, {"packed": True, "packed_buffer_size_bytes": 200_000}], ids=["each", "packed"])
async def test_a_float32_trainer_updates_a_bfloat16_engine(
    trainer: Trainer, model: Path, other_model: Path, info: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        create_engine("transformers", model=str(model), dtype="bfloat16") as engine,
        a_client(engine) as client,
        a_group(trainer, client, name=GROUP) as group,
    ):
        monkeypatch.setattr(type(engine), "gpus", property(lambda self: ("GPU-of-the-test",)))
        assert (await client.post("/start_weight_update", json={})).status_code == 200
        answer, error = await send_as_trl(group, other_model, tensors_of(other_model, "float32"), **info)
        assert (answer.status_code, error) == (200, ""), answer.text
        finished = await client.post("/finish_weight_update")
        assert finished.status_code == 200, finished.text
        assert same(await answers_of(client), await fresh(other_model, dtype="bfloat16"))


async def test_what_cannot_be_taken_is_received_and_the_update_is_dropped(transfer: Group, other_model: Path) -> None:
    (client,) = transfer.clients
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    await client.post("/start_weight_update")
    answer, error = await send_as_trl(transfer, other_model, [*tensors, {**tensors[0], "name": "absent"}])
    assert (answer.status_code, error) == (400, ""), answer.text
    assert "absent" in answer.json()["error"]["message"]
    finished = await client.post("/finish_weight_update", json={})
    assert finished.status_code == 400
    assert same(await answers_of(client), before)
    await client.post("/start_weight_update")
    assert (await send_as_trl(transfer, other_model, tensors))[0].status_code == 200
    assert (await client.post("/finish_weight_update")).status_code == 200
    assert same(await answers_of(client), await fresh(other_model))


async def test_an_update_that_was_not_started_ends_the_group(transfer: Group, other_model: Path) -> None:
    (client,) = transfer.clients
    answer, _ = await send_as_trl(transfer, other_model, tensors_of(other_model)[:1])
    assert answer.status_code == 400, answer.text
    assert (await client.post("/shutdown_weight_transfer_engine")).status_code == 400


@pytest.mark.parametrize(
    "info",
    [
        None,
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "unknown": 1},
        {"master_port": 1, "rank_offset": 1, "world_size": 2},
        {"master_address": "127.0.0.1", "master_port": "x", "rank_offset": 1, "world_size": 2},
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 2, "world_size": 2},
        {"nccl_unique_id_b64": "AAAA", "rank_offset": 1, "world_size": 2},
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    ],
    ids=["none", "unknown key", "no address", "port", "rank", "short id", "no GPU here"],
)
async def test_an_init_that_cannot_be_is_refused(with_gpu: httpx.AsyncClient, info: object) -> None:
    answer = await with_gpu.post("/init_weight_transfer_engine", json={"init_info": info})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


# A trainer whose group is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_libuv", [False, True], ids=["as vLLM", "as torch"])
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
async def test_a_trainer_does_not_wait_for_a_server_without_a_gpu(
    client: httpx.AsyncClient, address: str, use_libuv: bool
) -> None:
    port = free_port()
    asked = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 2}
    async with a_rank_0(port, use_libuv=use_libuv) as rank_0:
        answer = await client.post("/init_weight_transfer_engine", json={"init_info": asked})
        assert answer.status_code == 501, answer.text
        await require_released(rank_0)


@pytest.mark.parametrize("info", [{"unknown": 1}, {"rank_offset": 2}, {}], ids=["unknown", "rank", "no GPU here"])
async def test_a_trainer_may_begin_to_wait_after_the_refusal(
    with_gpu: httpx.AsyncClient, info: dict[str, object]
) -> None:
    port = free_port()
    asked = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **info}
    answer = await with_gpu.post("/init_weight_transfer_engine", json={"init_info": asked})
    assert answer.status_code == 400, answer.text
    async with a_rank_0(port) as rank_0:
        await require_released(rank_0)


@pytest.mark.parametrize("wrong", [{"backend": "nccl"}, {"backend": "mpi"}, {"rank_offset": 2}], ids=str)
async def test_a_trainer_of_sglangs_routes_does_not_wait_either(
    client: httpx.AsyncClient, wrong: dict[str, object]
) -> None:
    port = str(free_port())
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    async with a_rank_0(int(port), use_libuv=True) as rank_0:
        answer = await client.post("/init_weights_update_group", json={**body, **wrong})
        assert answer.status_code == 400, answer.text
        await require_released(rank_0)


async def test_a_second_request_for_a_place_ends_the_release_of_the_first(
    client: httpx.AsyncClient, trainer: Trainer
) -> None:
    port = free_port()
    place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "group_name": "again"}
    refused = await client.post("/init_weights_update_group", json={**place, "rank_offset": 2, "backend": "gloo"})
    assert refused.status_code == 400
    joining = trainer.do("join", address="127.0.0.1", port=port, world_size=2, group="again", backend="gloo")
    post = client.post("/init_weights_update_group", json={**place, "rank_offset": 1, "backend": "gloo"})
    answer = asyncio.create_task(post)
    await asyncio.sleep(0.3)  # the server has the request before the trainer listens
    assert await joining == ""
    assert (await answer).status_code == 200
    await client.post("/destroy_weights_update_group", json={"group_name": "again"})
    await trainer.do("destroy", group="again")


async def test_a_group_that_has_met_is_left_alone() -> None:
    dist: Any = torch.distributed
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=HANGING))
    assert not await release_trainer("127.0.0.1", port, 1)
    assert store.add("a", 1) == 1


async def test_an_address_without_a_store_is_left_alone(client: httpx.AsyncClient) -> None:
    url = client.base_url
    async with asyncio.timeout(HANGING):
        assert not await release_trainer(str(url.host), int(url.port or 0), 2), "a server of HTTP closes the connection"
        assert not await release_trainer("a..b", 1, 2)


# SkyRL's names for them ----------------------------------------------------------------------------------------------


async def test_skyrls_calls_of_workers_are_one_update(transfer: Group, other_model: Path) -> None:
    (client,) = transfer.clients
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    for _ in range(2):
        started = await rpc(client, "skyrl_start_weight_update", is_checkpoint_format=True)
        assert (started.status_code, started.json()) == (200, {"results": [None]}), started.text
        answer, error = await send_as_skyrl(transfer, other_model, tensors)
        assert (answer.status_code, error) == (200, ""), answer.text
        assert same(await answers_of(client), before)
        finished = await rpc(client, "skyrl_finish_weight_update")
        assert (finished.status_code, finished.json()) == (200, {"results": [None]}), finished.text
        before = await fresh(other_model)
        assert same(await answers_of(client), before)
    assert await version_of(client) == "2", "SkyRL names no versions: they are counted"


async def test_skyrls_calls_in_the_wrong_order_are_refused(transfer: Group, other_model: Path) -> None:
    (client,) = transfer.clients
    assert (await rpc(client, "skyrl_finish_weight_update")).status_code == 400
    assert (await rpc(client, "skyrl_start_weight_update")).status_code == 200
    assert (await rpc(client, "skyrl_start_weight_update")).status_code == 400
    answer, error = await send_as_skyrl(transfer, other_model, tensors_of(other_model)[:3])
    assert (answer.status_code, error) == (200, ""), answer.text
    finished = await rpc(client, "skyrl_finish_weight_update")
    assert finished.status_code == 400, "tensors are missing"
    assert (await rpc(client, "skyrl_finish_weight_update")).status_code == 400, "and the update is gone"
    answer, _ = await send_as_skyrl(transfer, other_model, tensors_of(other_model)[:1])
    assert answer.status_code == 400
    assert (await client.post("/shutdown_weight_transfer_engine")).status_code == 400, "nobody waits in a broadcast"


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        ({}, 400, "InvalidRequest", "expected the name of a method"),
        ({"method": 7}, 400, "InvalidRequest", "method=7"),
        ({"method": "skyrl_start_weight_update", "args": 1}, 400, "InvalidRequest", "expected a list"),
        ({"method": "skyrl_start_weight_update", "args": 0}, 400, "InvalidRequest", "expected a list"),
        ({"method": "skyrl_start_weight_update", "args": [True, 2]}, 400, "InvalidRequest", "got [2] beside"),
        ({"method": "skyrl_start_weight_update", "kwargs": {"layers": 1}}, 400, "InvalidRequest", "'layers'"),
        (
            {"method": "skyrl_start_weight_update", "args": [False]},
            501,
            "UnsupportedCapability",
            "is_checkpoint_format",
        ),
        ({"method": "update_weights_ipc", "kwargs": {"update_info": {}}}, 501, "UnsupportedCapability", "unpickles"),
        ({"method": "execute_method"}, 501, "UnsupportedCapability", "'execute_method' is not served; expected one of"),
        ({"method": "__class__"}, 501, "UnsupportedCapability", "'__class__' is not served"),
    ],
)
async def test_other_calls_of_workers_are_refused(
    with_gpu: httpx.AsyncClient, body: dict[str, object], status: int, kind: str, text: str
) -> None:
    answer = await with_gpu.post("/collective_rpc", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["drivetrain"]["error"] == kind
    assert text in answer.json()["error"]["message"]


async def test_a_call_of_a_worker_needs_a_gpu(client: httpx.AsyncClient) -> None:
    for method in ("skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update"):
        answer = await rpc(client, method)
        assert answer.status_code == 501, answer.text
        assert "this engine has no GPU" in answer.json()["error"]["message"]
