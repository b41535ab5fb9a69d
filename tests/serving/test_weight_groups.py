"""Weights that a trainer's process broadcasts in its own torch.distributed group, on the wire of slime and AReaL."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from drivetrain import InferenceEngine, WeightPlanMismatch, create_engine
from drivetrain.testing import tiny_model
from drivetrain_fleet import InferenceEngineClient
from drivetrain_serving import create_app
from engines import HANGING
from trainer_groups import (
    GONE,
    GREEDY,
    Group,
    Tensor,
    Trainer,
    a_client,
    a_group,
    a_trainer,
    answers_of,
    free_port,
    fresh,
    same,
    tensors_of,
    version_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def group(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine, model: Path
) -> AsyncIterator[Group]:
    """A group of the trainer and the session's server, which serves ``model`` as ``initial`` again afterwards."""
    async with a_group(trainer, client) as group:
        yield group
    await engine.load_weights_from_disk(str(model), "initial")
    await engine.continue_generation()


# Whole updates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_an_update_is_served_once_every_tensor_has_come(
    group: Group, client: httpx.AsyncClient, model: Path, other_model: Path, load_format: str | None
) -> None:
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    answer, _ = await group.send(other_model, tensors[:-1], weight_version="3", load_format=load_format)
    assert answer.status_code == 200, answer.text
    assert same(await answers_of(client), before), "nothing is applied before the last tensor has come"
    assert await version_of(client) == "initial"
    answer, _ = await group.send(other_model, tensors[-1:], weight_version="3", load_format=load_format)
    assert answer.status_code == 200, answer.text
    assert same(await answers_of(client), await fresh(other_model))
    assert await version_of(client) == "3"


async def test_one_update_follows_another_and_versions_are_counted(
    group: Group, client: httpx.AsyncClient, model: Path, other_model: Path
) -> None:
    before = await answers_of(client)
    await group.send_all(other_model, tensors_of(other_model), weight_version="7")
    changed = await answers_of(client)
    await group.send_all(model, tensors_of(model, "float32"), abort_all_requests=True)  # as AReaL: no version
    assert await version_of(client) == "8"
    assert same(await answers_of(client), before)
    await group.send_all(other_model, [{**one, "dtype": "torch.float32"} for one in tensors_of(other_model)][::-1])
    assert same(await answers_of(client), changed)


async def test_casts_that_lose_nothing_are_made(group: Group, client: httpx.AsyncClient, other_model: Path) -> None:
    rounded = tiny_model("qwen2", seed=1, dtype="bfloat16")
    await group.send_all(rounded, tensors_of(rounded))
    assert same(await answers_of(client), await fresh(rounded, dtype="float32"))


@pytest.mark.slow
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_a_float32_trainer_updates_a_bfloat16_engine(
    trainer: Trainer, model: Path, other_model: Path, load_format: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        create_engine("transformers", model=str(model), dtype="bfloat16") as engine,
        a_client(engine) as client,
        a_group(trainer, client) as group,
    ):
        tensors = tensors_of(other_model)
        assert {one["dtype"] for one in tensors} == {"float32"}
        await group.send_all(other_model, tensors, load_format=load_format, weight_version="1")
        assert same(await answers_of(client), await fresh(other_model, dtype="bfloat16"))
        name = "model.norm.weight"
        rounded = load_file(other_model / "model.safetensors")[name].bfloat16().float().tolist()
        held = await client.post("/get_weights_by_name", json={"name": name, "truncate_size": len(rounded)})
        assert held.json() == rounded
        await group.send_all(model, tensors_of(model), weight_version="2")
        assert await version_of(client) == "2"
        assert caplog.text.count("weights are rounded to the engine's dtype: float32 to bfloat16") == 1
        before = await answers_of(client)
        beyond = {**tensors[0], "values": torch.finfo(torch.float32).max}
        await group.send_all(other_model, tensors[1:])
        answer, _ = await group.send(other_model, tensors[:1], sent=[beyond])
        assert answer.status_code == 400, answer.text
        assert "not finite" in answer.json()["message"], "it is infinite in bfloat16"
        assert same(await answers_of(client), before)


async def test_quantised_values_are_not_cast(group: Group, client: httpx.AsyncClient, other_model: Path) -> None:
    quantised = tensors_of(other_model, "float8_e4m3fn")
    answer, error = await group.send(other_model, quantised, load_format="flattened_bucket")
    assert (answer.status_code, error) == (400, ""), answer.text
    assert "float8_e4m3fn" in answer.json()["message"], "they mean nothing without their scales"


async def test_a_server_without_casts_refuses_what_would_be_rounded(
    trainer: Trainer, model: Path, other_model: Path
) -> None:
    async with (
        create_engine("transformers", model=str(model), dtype="bfloat16") as engine,
        a_client(engine, cast_weights=False) as client,
        a_group(trainer, client) as group,
    ):
        before = await answers_of(client)
        answer, error = await group.send(other_model, tensors_of(other_model))
        assert (answer.status_code, error) == (400, ""), answer.text
        assert "float32" in answer.json()["message"]
        assert same(await answers_of(client), before)


async def test_an_update_between_begin_and_end_is_applied_at_the_end(
    group: Group, client: httpx.AsyncClient, other_model: Path
) -> None:
    before = await answers_of(client)
    assert (await client.post("/end_weight_update", json={})).status_code == 400
    assert (await client.post("/begin_weight_update", json={"selector": "draft"})).status_code == 400
    assert (await client.post("/begin_weight_update", json={"selector": "all"})).json()["success"] is True
    again = await client.post("/begin_weight_update")
    assert (again.status_code, again.json()["success"]) == (400, False)
    await group.send_all(other_model, tensors_of(other_model))
    assert same(await answers_of(client), before)
    ended = await client.post("/end_weight_update")
    assert ended.status_code == 200, ended.text
    assert same(await answers_of(client), await fresh(other_model))


async def test_an_update_that_ends_too_early_is_dropped(
    group: Group, client: httpx.AsyncClient, other_model: Path
) -> None:
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    await client.post("/begin_weight_update")
    await group.send_all(other_model, tensors[1:])
    ended = await client.post("/end_weight_update")
    assert ended.status_code == 400
    assert tensors[0]["name"] in ended.json()["message"]
    assert same(await answers_of(client), before)
    await group.send_all(other_model, tensors)
    assert same(await answers_of(client), await fresh(other_model))


async def test_a_folder_takes_the_place_of_an_update_that_was_not_completed(
    group: Group, client: httpx.AsyncClient, model: Path, other_model: Path
) -> None:
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    await group.send_all(other_model, tensors[:9])
    loaded = await client.post("/update_weights", json={"weight_dir": str(model), "weight_version": "folder"})
    assert loaded.status_code == 200, loaded.text
    await group.send_all(other_model, tensors[9:])
    assert (await client.post("/end_weight_update")).status_code == 400, "the first tensors were dropped"
    assert same(await answers_of(client), before)


async def test_two_groups_bring_one_update(
    group: Group, trainer: Trainer, client: httpx.AsyncClient, other_model: Path
) -> None:
    tensors = tensors_of(other_model)
    async with a_group(trainer, client) as second:
        await group.send_all(other_model, tensors[::2])
        await second.send_all(other_model, tensors[1::2])
    assert same(await answers_of(client), await fresh(other_model))


async def test_requests_do_not_go_on_with_tensors_missing(
    trainer: Trainer, served: InferenceEngine, engine: InferenceEngine, model: Path, other_model: Path
) -> None:
    app = create_app(served)
    groups = app.state.weight_groups
    tensors = tensors_of(other_model)
    await groups.commit_open_update()
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=HANGING) as client,
        a_group(trainer, client) as group,
    ):
        await engine.pause_generation("abort")
        await group.send_all(other_model, tensors[:3])
        for _ in range(2):
            with pytest.raises(WeightPlanMismatch, match="have not come"):
                await groups.commit_open_update()
        await group.send_all(other_model, tensors[3:])
        with pytest.raises(WeightPlanMismatch, match="have not come"):
            await groups.commit_open_update()
        await group.send_all(other_model, tensors, weight_version="new")
        assert engine.get_weight_version() == "new", "complete, so committed before requests go on"
        await groups.commit_open_update()
        await client.post("/begin_weight_update")
        await group.send_all(model, tensors_of(model), weight_version="initial")
        assert engine.get_weight_version() == "new"
        await groups.commit_open_update()
        assert engine.get_weight_version() == "initial"
        assert engine.is_paused
        await engine.continue_generation()
    await groups.close()


# Tied weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["not sent", "sent first", "sent last"])
async def test_tied_weights_may_be_sent_or_not(trainer: Trainer, order: str) -> None:
    folder, other = (tiny_model("qwen2", tie_word_embeddings=True, seed=seed) for seed in (0, 1))
    tensors = [one for one in tensors_of(other) if one["name"] != "lm_head.weight"]
    (embedding,) = (one for one in tensors if one["name"] == "model.embed_tokens.weight")
    alias = {**embedding, "name": "lm_head.weight", "of": "model.embed_tokens.weight"}
    sent = {"not sent": tensors, "sent first": [alias, *tensors], "sent last": [*tensors, alias]}[order]
    async with (
        create_engine("transformers", model=str(folder)) as engine,
        a_client(engine) as client,
        a_group(trainer, client) as group,
    ):
        await group.send_all(other, sent, size=1, weight_version="tied")
        assert await version_of(client) == "tied"
        assert same(await answers_of(client), await fresh(other))
        await group.send_all(folder, sent, weight_version="again")
        assert same(await answers_of(client), await fresh(folder))
        # A tied name with other values is not of the update that was committed, so it begins another.
        answer, _ = await group.send(other, [alias], weight_version="third")
        assert answer.status_code == 200
        assert (await client.post("/end_weight_update")).status_code == 400
        assert same(await answers_of(client), await fresh(folder))


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": "model.absent.weight"}, "model.absent.weight"),
        ({"shape": [1, 128]}, "shape|expected"),
        ({"dtype": "int32"}, "int32"),
    ],
    ids=["unknown name", "wrong shape", "integers"],
)
async def test_what_cannot_be_taken_is_received_and_refused(
    group: Group, client: httpx.AsyncClient, other_model: Path, wrong: Tensor, why: str, load_format: str | None
) -> None:
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    norm = next(one for one in tensors if one["name"] == "model.norm.weight")
    others = [one for one in tensors if one is not norm]
    answer, error = await group.send(other_model, [others[0], {**norm, **wrong}], load_format=load_format)
    assert error == "", "the trainer's broadcasts were received"
    assert answer.status_code == 400, answer.text
    assert answer.json()["success"] is False
    assert why.split("|")[0] in answer.json()["message"] or why.split("|")[-1] in answer.json()["message"]
    await group.send_all(other_model, others[1:])
    await group.send(other_model, [norm])
    assert same(await answers_of(client), before), "an update of which a part was refused is not applied"
    await group.send_all(other_model, tensors, load_format=load_format)
    assert same(await answers_of(client), await fresh(other_model))


async def test_weights_that_are_not_finite_are_refused(
    group: Group, client: httpx.AsyncClient, other_model: Path
) -> None:
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    await group.send_all(other_model, tensors[1:])
    answer, _ = await group.send(other_model, tensors[:1], sent=[{**tensors[0], "values": float("nan")}])
    assert answer.status_code == 400, answer.text
    assert tensors[0]["name"] in answer.json()["message"]
    assert same(await answers_of(client), before)
    await group.send_all(other_model, tensors)
    assert same(await answers_of(client), await fresh(other_model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"names": None},
        {"shapes": []},
        {"dtypes": ["of no kind"]},
        {"dtypes": [3]},
        {"shapes": [[-1]]},
        {"shapes": [[2**62, 2**62]]},
        {"load_format": "some.loader"},
        {"names": [""]},
    ],
    ids=str,
)
async def test_a_bucket_that_cannot_be_read_ends_the_group(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine, wrong: dict[str, object]
) -> None:
    async with a_group(trainer, client) as group:
        body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "group_name": group.name, **wrong}
        answer = await client.post("/update_weights_from_distributed", json=body)
        assert answer.status_code in (400, 500), answer.text
        assert answer.json()["success"] is False
        sending = trainer.do(
            "send", group=group.name, folder=str(tiny_model("qwen2")), flattened=False,
            tensors=[{"name": "a", "dtype": "float32", "shape": [2]}],
        )  # fmt: skip
        async with asyncio.timeout(HANGING):
            assert await sending != "", "the trainer's broadcast fails instead of waiting"


@pytest.mark.parametrize(
    "wrong",
    [
        {"master_port": "a port"},
        {"master_address": None},
        {"rank_offset": 2},
        {"world_size": 1},
        {"backend": "mpi"},
        {"group_name": ""},
    ],
    ids=str,
)
async def test_a_group_that_cannot_be_is_refused(
    client: httpx.AsyncClient, engine: InferenceEngine, wrong: dict[str, object]
) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    answer = await client.post("/init_weights_update_group", json={**body, **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["success"] is False


# Groups that are lost ------------------------------------------------------------------------------------------------


async def test_a_group_that_never_forms_is_given_up(engine: InferenceEngine) -> None:
    async with a_client(engine, weight_group_timeout=1.0) as client:
        answer = await client.post(
            "/init_weights_update_group",
            json={
                "master_address": "127.0.0.1",
                "master_port": free_port(),
                "rank_offset": 1,
                "world_size": 2,
                "backend": "gloo",
            },
        )
        assert answer.status_code == 504
        assert "ranks of the group 'weight_update_group' to join" in answer.json()["message"]
        assert (await client.get("/health")).status_code == 200


async def test_commands_for_a_dead_trainer_return_an_error() -> None:
    async with a_trainer() as dead:
        dead.process.kill()
        await dead.process.wait()
        assert await dead.do("destroy", group="none") == GONE


async def test_a_trainer_that_dies_in_a_bucket_leaves_the_old_weights(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine, model: Path, other_model: Path
) -> None:
    before = await answers_of(client)
    tensors = tensors_of(other_model)
    async with a_trainer() as dying, a_group(dying, client) as group:
        await group.send_all(other_model, tensors[:2])
        body = {"names": [], "dtypes": [], "shapes": [], "group_name": group.name}
        for one in tensors[2:6]:
            for field in ("name", "dtype", "shape"):
                body[f"{field}s"].append(one[field])  # type: ignore[attr-defined]
        waiting = asyncio.create_task(client.post("/update_weights_from_distributed", json=body))
        assert await dying.do(
            "send", group=group.name, folder=str(other_model), tensors=tensors[2:4], flattened=False
        ) == ""  # fmt: skip
        assert (await client.get("/health")).status_code == 200
        assert same(await answers_of(client), before), "the engine serves while a bucket is awaited"
        assert not waiting.done()
        dying.process.kill()
        async with asyncio.timeout(HANGING):
            answer = await waiting
        assert answer.status_code == 500, answer.text
        assert group.name in answer.json()["message"]
        gone = await client.post("/update_weights_from_distributed", json=body)
        assert gone.status_code == 400, "the group is gone"
    assert same(await answers_of(client), before)
    assert await version_of(client) == "initial"
    async with a_group(trainer, client) as group:
        await group.send_all(other_model, tensors)
        assert same(await answers_of(client), await fresh(other_model))
        await group.send_all(model, tensors_of(model), weight_version="initial")


async def test_a_group_is_destroyed_also_while_a_bucket_is_awaited(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    async with a_group(trainer, client) as group:
        body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[128]], "group_name": group.name}
        waiting = asyncio.create_task(client.post("/update_weights_from_distributed", json=body))
        await asyncio.sleep(0)
        name = {"group_name": group.name}
        assert (await client.post("/destroy_weights_update_group", json=name)).json()["success"] is True
        async with asyncio.timeout(HANGING):
            assert (await waiting).status_code in (400, 500)
        again = await client.post("/destroy_weights_update_group", json=name)
        assert (again.status_code, again.json()["success"]) == (400, False)
        assert group.name in again.json()["message"]


async def test_a_client_that_leaves_gives_up_its_group(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine, other_model: Path
) -> None:
    tensors = tensors_of(other_model)[:1]
    async with a_group(trainer, client) as group:
        body = {name: [tensors[0][name[:-1]]] for name in ("names", "dtypes", "shapes")}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/update_weights_from_distributed", json={**body, "group_name": group.name}, timeout=0.5)
        sent = {"group": group.name, "folder": str(other_model), "tensors": tensors, "flattened": False}
        async with asyncio.timeout(HANGING):
            while not await trainer.do("send", **sent):
                pass


# Fleets and several servers ------------------------------------------------------------------------------------------


async def test_a_fleet_takes_weights_as_one_server(trainer: Trainer, model: Path, other_model: Path) -> None:
    engines = [create_engine("transformers", model=str(model)) for _ in range(2)]
    async with (
        InferenceEngineClient(engines) as fleet,
        a_client(fleet) as client,
        a_group(trainer, client) as group,
    ):
        await group.send_all(other_model, tensors_of(other_model), weight_version="5")
        expected = await fresh(other_model)
        assert [engine.get_weight_version() for engine in engines] == ["5", "5"]
        for engine in engines:
            (output,) = (await engine.generate([[5, 6, 7]], GREEDY)).completions
            assert list(output.token_ids) == expected[0]
        assert same(await answers_of(client), expected)


@pytest.mark.slow
async def test_two_servers_are_two_ranks_of_one_group(
    trainer: Trainer, client: httpx.AsyncClient, engine: InferenceEngine, model: Path, other_model: Path
) -> None:
    async with (
        create_engine("transformers", model=str(model), isolation="process") as second,
        a_client(second) as other_client,
        a_group(trainer, client, other_client) as group,
    ):
        for folder in (other_model, model):
            await group.send_all(folder, tensors_of(folder), weight_version=folder.name)
            expected = await fresh(folder)
            assert same(await answers_of(client), expected)
            assert same(await answers_of(other_client), expected)
    await engine.update_weight_version("initial")


async def test_the_receiving_process_ends_with_the_server() -> None:
    receiving = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "drivetrain_weight_sync.trainer_groups.receiving_process", stdin=PIPE, stdout=PIPE
    )
    assert receiving.stdin is not None
    join = {"type": "join", "group_name": "g", "rank": 1, "world_size": 2, "timeout": 600, "backend": "gloo"}
    join |= {"master_address": "127.0.0.1", "master_port": free_port()}
    receiving.stdin.write(json.dumps(join).encode() + b"\n")
    receiving.stdin.close()
    async with asyncio.timeout(HANGING):
        assert await receiving.wait() == 0, "it ends although it waits for a trainer"
