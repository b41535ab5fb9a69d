"""The routes that control: pauses, sleep, weights and adapters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from drivetrain import InferenceEngine, MemoryTag
from drivetrain_serving import Server, ServerConfig
from engines import HANGING, until, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


async def ok(client: httpx.AsyncClient, path: str, **body: object) -> httpx.Response:
    response = await client.post(path, json=body or None)
    assert response.status_code == 200, response.text
    return response


async def text(client: httpx.AsyncClient, **more: object) -> str:
    body = {"prompt": [5, 6], "max_tokens": 8, "temperature": 0, **more}
    found: str = (await ok(client, "/v1/completions", **body)).json()["choices"][0]["text"]
    return found


async def test_the_server_describes_itself(client: httpx.AsyncClient, engine: InferenceEngine, model: Path) -> None:
    (card, *_) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("policy", engine.model_info.context_length)
    info = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["model_config"]["logprobs_mode"] == "temperature_logprobs"
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert (await client.get("/get_world_size?include_dp=true")).json() == {"world_size": 1}
    for path in ("/health", "/ready"):
        assert (await client.get(path)).status_code == 200
    assert 'drivetrain_state{state="ready"} 1.0' in (await client.get("/metrics")).text
    assert (await client.get("/version")).json()["version"]


async def test_an_abort_ends_what_is_in_flight_with_its_tokens(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    running = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await until_running(engine, 1)
    await ok(client, "/pause?mode=abort")
    (choice,) = (await running).json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < 400
    waiting = asyncio.create_task(text(client))
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 503
    assert not waiting.done(), "a request that arrives in a pause waits"
    await ok(client, "/resume")
    assert await waiting
    await ok(client, "/resume")


@pytest.mark.parametrize("clear", ["true", "false"])
async def test_what_a_pause_keeps_goes_on(client: httpx.AsyncClient, engine: InferenceEngine, clear: str) -> None:
    expected = (await ok(client, "/v1/completions", **LONG)).json()["choices"][0]["token_ids"]
    running = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await until_running(engine, 1)
    await ok(client, f"/pause?mode=keep&clear_cache={clear}")
    assert not running.done()
    await ok(client, "/resume")
    assert (await running).json()["choices"][0]["token_ids"] == expected


async def test_one_request_is_aborted_by_its_id(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    running = [
        asyncio.create_task(client.post("/v1/completions", json={**LONG, "request_id": name})) for name in ("a", "b")
    ]
    await until_running(engine, 2)
    assert (await ok(client, "/abort_requests", request_ids=["a"])).json()["status"] == "aborted"
    first = (await running[0]).json()
    assert first["id"] == "cmpl-a"
    assert first["choices"][0]["finish_reason"] == "abort"
    assert (await running[1]).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("named", ["a", "cmpl-a", "generate-tokens-a", "chatcmpl-a", "cmpl-a-1"])
async def test_a_request_is_aborted_by_the_ids_that_vllm_gives_it(
    client: httpx.AsyncClient, engine: InferenceEngine, named: str
) -> None:
    prompts: dict[str, tuple[str, dict[str, object], int]] = {
        "chatcmpl-a": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 1),
        "generate-tokens-a": ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": LONG}, 1),
    }
    route, prompt, count = prompts.get(named, ("/v1/completions", {"prompt": [[5, 6], [7, 8]]}, 2))
    body = {**LONG, **prompt}
    running = asyncio.create_task(client.post(route, json={**body, "request_id": "a"}))
    other = asyncio.create_task(client.post("/v1/completions", json={**LONG, "request_id": "a-1x"}))
    await until_running(engine, 1 + count)
    await ok(client, "/abort_requests", request_ids=[named])
    reasons = [choice["finish_reason"] for choice in (await running).json()["choices"]]
    assert reasons == (["length", "abort"] if named == "cmpl-a-1" else ["abort"] * len(reasons))
    assert (await other).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("kind", "route", "prompt"),
    [
        ("cmpl", "/v1/completions", {}),
        ("chatcmpl", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("generate-tokens", "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": LONG}),
    ],
)
async def test_a_header_gives_requests_their_id(
    client: httpx.AsyncClient, engine: InferenceEngine, kind: str, route: str, prompt: dict[str, object]
) -> None:
    """Several requests in flight may have one id, as vLLM lets them; an abort ends them all."""
    body = {**LONG, **prompt, "request_id": "of-the-body"}
    headers = {"X-Request-Id": "r"}
    running = [asyncio.create_task(client.post(route, json=body, headers=headers)) for _ in range(2)]
    other = asyncio.create_task(client.post(route, json=body, headers={"X-Request-Id": ""}))
    await until_running(engine, 3)
    await ok(client, "/abort_requests", request_ids=["r"])
    for answer in [(await one).json() for one in running]:
        assert answer["request_id" if kind == "generate-tokens" else "id"] == f"{kind}-r"
        assert answer["choices"][0]["finish_reason"] == "abort"
    last = (await other).json()
    assert last["request_id" if kind == "generate-tokens" else "id"] == f"{kind}-of-the-body"
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("wrong", ["", "r", False, 0, {}, [7]])
async def test_ids_of_a_wrong_type_abort_nothing(
    client: httpx.AsyncClient, engine: InferenceEngine, wrong: object
) -> None:
    running = asyncio.create_task(client.post("/v1/completions", json={**LONG, "max_tokens": 900, "request_id": "r"}))
    await until_running(engine, 1)
    assert (await client.post("/abort_requests", json={"request_ids": wrong})).status_code == 400
    assert not running.done()
    await ok(client, "/abort_requests", request_ids=["r"])
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"


async def test_an_id_that_is_given_often_is_aborted_once(
    client: httpx.AsyncClient, served: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []
    abort = served.abort

    async def counting(request_id: str) -> None:
        aborted.append(request_id)
        await abort(request_id)

    monkeypatch.setattr(served, "abort", counting)
    for path in ("/abort_requests", "/inference/v1/abort_requests"):
        await ok(client, path, request_ids=["x", "y", "x"] * 1000)
    assert aborted == ["x", "y"] * 2


@pytest.mark.parametrize(
    ("route", "prompt"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("responses", {"input": "a", "max_output_tokens": 900}),
    ],
)
async def test_a_header_gives_requests_of_sessions_their_id(
    client: httpx.AsyncClient, engine: InferenceEngine, route: str, prompt: dict[str, object]
) -> None:
    body = {"max_tokens": 900, "ignore_eos": True, **prompt}
    path = f"/sessions/by-header/v1/{route}"
    headers = {"X-Request-Id": "of-a-session"}
    running = [asyncio.create_task(client.post(path, json=body, headers=headers)) for _ in range(2)]
    await until_running(engine, 2)
    await ok(client, "/abort_requests", request_ids=["of-a-session"])
    for answer in [await one for one in running]:
        assert answer.status_code == 200, answer.text
        if route == "chat/completions":
            assert answer.json()["id"] == "chatcmpl-of-a-session"
    await client.delete("/sessions/by-header")


async def test_servers_of_one_engine_may_have_requests_of_one_id(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    """Clients number their requests, and a router spreads them over servers that share an engine."""
    async with (
        Server(engine, ServerConfig(port=0)) as other,
        httpx.AsyncClient(base_url=other.url, timeout=HANGING) as its,
    ):
        body = {**LONG, "max_tokens": 900, "request_id": "one"}
        running = [asyncio.create_task(one.post("/v1/completions", json=body)) for one in (client, its)]
        await until_running(engine, 2)
        await ok(client, "/abort_requests", request_ids=["one"])
        await ok(its, "/abort_requests", request_ids=["one"])
        for answer in await asyncio.gather(*running):
            assert (answer.status_code, answer.json()["id"]) == (200, "cmpl-one"), answer.text
            assert answer.json()["choices"][0]["finish_reason"] == "abort"


async def test_ids_may_be_as_long_as_a_header(client: httpx.AsyncClient) -> None:
    """Our engines take ids of a bounded length; vLLM's server takes any."""
    body = {"prompt": [5, 6], "max_tokens": 1, "request_id": "i" * 3000}
    answer = await ok(client, "/v1/completions", **body)
    assert answer.json()["id"] == f"cmpl-{'i' * 3000}"


async def test_a_stream_is_aborted_by_the_id_that_it_tells(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.aiter_lines()
        told = json.loads((await anext(lines)).removeprefix("data: "))["id"]
        await ok(client, "/abort_requests", request_ids=[told])
        pieces = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    assert pieces[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    "path",
    [
        "/pause?mode=sometimes",
        "/pause?clear_cache=perhaps",
        "/sleep?level=3",
        "/sleep?level=2&tags=all",
        "/sleep?level=0&tags=kv_cache",
    ],
)
async def test_a_wrong_query_changes_nothing(client: httpx.AsyncClient, engine: InferenceEngine, path: str) -> None:
    assert (await client.post(path)).status_code == 400
    assert not engine.is_paused


async def test_the_cache_is_freed_in_a_pause(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    body = {**LONG, "max_tokens": 4}
    before = (await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
    assert (await client.post("/release_kv_cache_memory")).status_code == 400
    await ok(client, "/pause")
    answer = await ok(client, "/release_kv_cache_memory")
    assert answer.json() == {"status": "kv_cache_released"}
    assert engine.status.asleep == {MemoryTag.KV_CACHE}
    woken = await ok(client, "/wake_up?tags=kv_cache")
    assert woken.json() == {"status": "awake", "tags": ["kv_cache"]}
    assert not engine.is_paused
    assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"] == before


async def test_a_sleep_frees_the_memory_of_its_tags(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    before = await text(client)
    for level in (1, 2):
        await ok(client, f"/sleep?level={level}&tags=kv_cache")
        assert engine.status.asleep == {MemoryTag.KV_CACHE}
        assert (await ok(client, "/wake_up")).json()["status"] == "awake"
        assert await text(client) == before, "the weights stayed"
    for query in ("level=1&tags=weights", "level=2&tags=cuda_graph"):
        assert (await client.post(f"/sleep?{query}")).status_code == 501
        assert not engine.is_paused, "refused before the pause"


async def test_weights_that_slept_away_are_not_served(
    client: httpx.AsyncClient, engine: InferenceEngine, model: Path
) -> None:
    before = await text(client)
    refused = await client.post("/sleep?level=1")
    assert refused.status_code == 501, "this engine cannot keep its weights"
    await ok(client, "/sleep?level=2")
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
    await ok(client, "/wake_up?tags=weights")
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
    await ok(client, "/wake_up?tags=kv_cache")
    resumed = await client.post("/resume")
    assert resumed.status_code == 503, "the weights were dropped, and none have come"
    assert resumed.json()["error"]
    await ok(client, "/update_weights", weight_dir=str(model), weight_version="initial")
    await ok(client, "/resume")
    assert await text(client) == before


async def test_a_folder_of_weights_is_served_under_its_version(
    client: httpx.AsyncClient, engine: InferenceEngine, model: Path, other_model: Path
) -> None:
    before = await text(client)
    running = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await until_running(engine, 1)
    await ok(client, "/pause?mode=keep&clear_cache=false")
    await ok(client, "/update_weights", weight_dir=str(other_model))
    assert (await client.get("/weight_info")).json() == {"weight_version": other_model.name}
    await ok(client, "/resume")
    spans = (await running).json()["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["initial", other_model.name]
    assert await text(client) != before
    for wrong in ({"weight_dir": str(model / "absent")}, {"weight_dir": ""}, {"weight_dir": 5}, {}):
        refused = await client.post("/update_weights", json=wrong)
        assert refused.status_code == 400, wrong
    assert (await client.get("/weight_info")).json() == {"weight_version": other_model.name}
    await ok(client, "/update_weights", weight_dir=str(model), weight_version="initial")
    assert await text(client) == before


async def test_a_folder_of_another_model_is_the_requests_fault(client: httpx.AsyncClient, adapters: Path) -> None:
    refused = await client.post("/update_weights", json={"weight_dir": str(adapters / "one")})
    assert refused.status_code == 400
    assert refused.json()["drivetrain"] == {"error": "WeightPlanMismatch"}


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk"])
async def test_a_version_is_a_number_or_refused(client: httpx.AsyncClient, model: Path, path: str) -> None:
    folder = {"weight_dir": str(model), "model_path": str(model)}
    await ok(client, path, **folder, weight_version=7)
    assert (await client.get("/weight_info")).json() == {"weight_version": "7"}
    for wrong in (True, 1.5, ["8"]):
        assert (await client.post(path, json={**folder, "weight_version": wrong})).status_code == 400
    assert (await client.get("/weight_info")).json() == {"weight_version": "7"}
    await ok(client, path, **folder, weight_version="initial")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weight_version", {"new_version": "wrong", "abort_all_requests": "yes"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/", "load_inplace": "true"}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}),
        ("/tokenize", {"prompt": "a", "return_token_strs": "no"}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": 0}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": 1}),
    ],
)
async def test_a_switch_that_is_no_boolean_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    refused = await client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == list(body)[-1]


async def test_routes_of_a_transfer_that_does_not_exist_are_refused(client: httpx.AsyncClient) -> None:
    for path in ("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"):
        response = await client.post(path, json={})
        assert response.status_code == 501
        assert response.json()["drivetrain"]["error"] == "UnsupportedCapability"
    assert (await client.post("/update_weights", json={"update_info": {"names": []}})).status_code == 501
    assert (await client.get("/server_info")).json()["vllm_config"]["weight_transfer_config"] is None


async def test_a_label_is_changed(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    await ok(client, "/update_weight_version", new_version="renamed")
    assert engine.get_weight_version() == "renamed"
    assert (await client.post("/update_weight_version", json={"new_version": 3})).status_code == 400
    await ok(client, "/update_weight_version", new_version="initial")


# Adapters ------------------------------------------------------------------------------------------------------------


async def test_an_adapter_is_loaded_when_it_is_first_named(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    base = await text(client)
    assert await text(client, model="one") != base
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert cards["one"]["parent"] == "policy"
    assert await text(client, model="policy") == base
    await ok(client, "/v1/unload_lora_adapter", lora_name="one")


async def test_adapters_are_loaded_replaced_and_unloaded(
    client: httpx.AsyncClient, engine: InferenceEngine, adapters: Path
) -> None:
    one, two = str(adapters / "one"), str(adapters / "two")
    response = await ok(client, "/v1/load_lora_adapter", lora_name="adapter", lora_path=one)
    assert response.text == "Success: LoRA adapter 'adapter' added successfully."
    first = await text(client, model="adapter")
    again = await client.post("/v1/load_lora_adapter", json={"lora_name": "adapter", "lora_path": two})
    assert again.status_code == 400
    assert await text(client, model="adapter") == first
    await ok(client, "/load_lora_adapter", lora_name="adapter", lora_path=two)
    assert await text(client, model="adapter") != first
    await ok(client, "/v1/load_lora_adapter", lora_name="adapter", lora_path=one, load_inplace=True)
    assert await text(client, model="adapter") == first
    absent = {"lora_name": "absent", "lora_path": str(adapters / "absent")}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
        assert (await client.post(path, json=absent)).status_code == 404, "prime-rl asks again until it is there"
        assert (await client.post(path, json={**absent, "lora_path": str(adapters)})).status_code == 400
    for path in ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
        running = asyncio.create_task(client.post("/v1/completions", json={**LONG, "model": "adapter"}))
        await until_running(engine, 1)
        await ok(client, path, lora_name="adapter", lora_path=two)
        assert len((await running).json()["choices"][0]["token_ids"]) == 400, "a request that uses it ends first"
        assert await text(client, model="adapter") != first
        await ok(client, path, lora_name="adapter", lora_path=one)
    running = asyncio.create_task(client.post("/v1/completions", json={**LONG, "model": "adapter"}))
    await until_running(engine, 1)
    await ok(client, "/pause?mode=keep&clear_cache=false")
    held = await client.post("/load_lora_adapter", json={"lora_name": "adapter", "lora_path": two})
    assert held.status_code == 503, "a pause holds a request that uses it"
    await ok(client, "/resume")
    await running
    running = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await until_running(engine, 1)
    await ok(client, "/pause?mode=keep&clear_cache=false")
    await ok(client, "/load_lora_adapter", lora_name="adapter", lora_path=one)
    await ok(client, "/resume")
    assert len((await running).json()["choices"][0]["token_ids"]) == 400, "requests of the model itself go on"
    running = asyncio.create_task(client.post("/v1/completions", json={**LONG, "model": "adapter"}))
    await until_running(engine, 1)
    await ok(client, "/v1/unload_lora_adapter", lora_name="adapter")
    assert len((await running).json()["choices"][0]["token_ids"]) == 400, "a request that uses it ends first"
    assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "adapter"})).status_code == 404
    assert (await client.post("/v1/completions", json={"prompt": [5], "model": "adapter"})).status_code == 404
    await ok(client, "/update_weight_version", new_version="initial")


async def test_a_client_that_leaves_ends_its_request(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    for more in ({}, {"stream": True}):
        await ok(client, "/pause?mode=keep&clear_cache=false")
        asking = asyncio.create_task(client.post("/v1/completions", json={**LONG, **more}))
        await asyncio.sleep(0.2)
        await ok(client, "/resume")
        await until_running(engine, 1)
        asking.cancel()

        async def idle() -> bool:
            stats = await engine.stats()
            return stats.running + stats.waiting == 0

        await until(idle)
