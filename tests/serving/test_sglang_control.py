"""SGLang's routes that control, and the paths that both dialects have."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.openai_fields import translated
from drivetrain_serving.sglang.routes import TENSOR_ROUTES
from engines import HANGING, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang(served: InferenceEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose dialect is SGLang's."""
    async with Server(served, ServerConfig(port=0, dialect="sglang", served_model_name=("policy",))) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            yield client


async def ok(client: httpx.AsyncClient, path: str, **body: object) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def ids(client: httpx.AsyncClient) -> list[int]:
    body = await ok(client, "/generate", input_ids=[5, 6], sampling_params={"temperature": 0, "max_new_tokens": 8})
    found: list[int] = body["output_ids"]
    return found


# Description ---------------------------------------------------------------------------------------------------------


async def test_the_server_describes_itself(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = (await client.get(path)).json()
        assert info["enable_memory_saver"] is False, "slime compares it, and takes absence for another value"
        assert (info["tp_size"], info["pp_size"], info["disaggregation_mode"]) == (1, 1, "null")
        assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32", "and vLLM's clients read theirs"
    for path in ("/model_info", "/get_model_info"):
        info = (await client.get(path)).json()
        assert (info["served_model_name"], info["is_generation"]) == ("policy", True)
        assert info["weight_version"] == engine.get_weight_version()
    assert await engine.get_remote_weight_version(str(client.base_url)) == engine.get_weight_version()
    response = await client.request("GET", "/health", content=b"{}", headers={"content-type": "application/json"})
    assert response.status_code == 200, "AReaL sends a body"
    assert (await client.get("/health_generate")).status_code == 200


async def test_loads_count_the_requests(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    (load,) = (await client.get("/v1/loads?include=core")).json()["loads"]
    assert (load["num_running_reqs"] + load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 1)
    await client.post("/abort_request", json={"abort_all": True})
    await running
    (load,) = (await client.get("/v1/loads")).json()["loads"]
    assert load["num_total_reqs"] == 0


# Pauses and memory ---------------------------------------------------------------------------------------------------


async def test_the_cache_is_flushed_only_while_nothing_runs(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    assert (await client.get("/flush_cache")).status_code == 200
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    for method in ("GET", "POST"):
        assert (await client.request(method, "/flush_cache")).status_code == 400
    await ok(client, "/pause_generation")
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    waiting = asyncio.create_task(ids(client))
    await asyncio.sleep(0.05)
    assert (await client.get("/flush_cache")).status_code == 200, "what waits for the pause's end holds no cache"
    assert not waiting.done()
    assert (await client.get("/health")).status_code == 200
    await ok(client, "/continue_generation", torch_empty_cache=True)
    assert await waiting
    assert (await client.get("/flush_cache?timeout=soon")).status_code == 400


async def test_flushing_waits_as_long_as_it_is_told(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    assert (await client.post(f"/flush_cache?timeout={HANGING}")).status_code == 200
    assert len((await running)["output_ids"]) == 400


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_what_a_pause_freezes_goes_on(client: httpx.AsyncClient, engine: InferenceEngine, mode: str) -> None:
    expected = (await ok(client, "/generate", **LONG))["output_ids"]
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    assert (await ok(client, "/pause_generation", mode=mode))["status"] == "ok"
    assert (await client.get("/flush_cache")).status_code == 400, "a frozen request is one too"
    assert not running.done()
    await ok(client, "/continue_generation")
    await ok(client, "/continue_generation")
    assert (await running)["output_ids"] == expected


async def test_a_pause_can_be_repeated_in_another_mode(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    await ok(client, "/pause_generation")
    await ok(client, "/pause_generation", mode="in_place")
    assert engine.is_paused
    await ok(client, "/continue_generation")
    response = await client.post("/pause_generation", json={"mode": "wait"})
    assert response.status_code == 400, "SGLang has no such mode"
    assert not engine.is_paused


async def test_memory_is_released_and_resumed(client: httpx.AsyncClient, engine: InferenceEngine, model: Path) -> None:
    before = await ids(client)
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    assert (await client.post("/release_memory_occupation", json={})).status_code == 400, "a request runs"
    await client.post("/abort_request", json={"abort_all": True})
    await running
    response = await client.post("/release_memory_occupation", json={"tags": ["weights", "kv_cache"]})
    assert (response.status_code, response.content) == (200, b"null"), "slime reads JSON"
    refused = await client.post("/generate", json={"input_ids": [5]})
    assert refused.status_code == 503
    response = await client.post("/resume_memory_occupation", json={"tags": None})
    assert (response.status_code, response.content) == (200, b"null")
    refused = await client.post("/generate", json={"input_ids": [5]})
    assert refused.status_code == 503, "the weights were dropped, and none have come"
    assert "drivetrain" in refused.json()
    await ok(client, "/update_weights_from_disk", model_path=str(model), weight_version="initial")
    await ok(client, "/continue_generation")
    assert await ids(client) == before


@pytest.mark.parametrize("body", [{"tags": "weights"}, {"tags": ["nothing"]}, {"tags": [3]}])
async def test_wrong_tags_are_refused(client: httpx.AsyncClient, engine: InferenceEngine, body: object) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert (await client.post(path, json=body)).status_code == 400


# Weights and adapters ------------------------------------------------------------------------------------------------


async def test_a_folder_of_weights_is_served_under_its_version(
    client: httpx.AsyncClient, engine: InferenceEngine, model: Path, other_model: Path
) -> None:
    before = await ids(client)
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    body = await ok(client, "/update_weights_from_disk", model_path=str(other_model), weight_version="7")
    assert body["success"] is True
    (span,) = (await running)["meta_info"]["weight_versions"]
    assert span["version"] == "initial", "outside a pause, requests in flight end first"
    assert (await client.get("/get_weight_version")).json() == {"weight_version": "7"}
    assert await ids(client) != before
    response = await client.post("/update_weights_from_disk", json={"model_path": str(model / "absent")})
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert engine.get_weight_version() == "7"
    await ok(client, "/update_weights_from_disk", model_path=str(model), weight_version="initial", flush_cache=True)
    assert await ids(client) == before


async def test_an_update_in_a_pause_keeps_the_pause(
    client: httpx.AsyncClient, engine: InferenceEngine, model: Path
) -> None:
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    await ok(client, "/pause_generation", mode="retract")
    body = await ok(client, "/update_weights_from_disk", model_path=str(model))
    assert body["num_paused_requests"] == 1
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    version = engine.get_weight_version()
    assert version == model.name, "without a version it is the folder's name"
    await ok(client, "/continue_generation")
    spans = [one["version"] for one in (await running)["meta_info"]["weight_versions"]]
    assert spans == ["initial", version]
    running = asyncio.create_task(ok(client, "/generate", **LONG))
    await until_running(engine, 1)
    await ok(
        client, "/update_weights_from_disk", model_path=str(model), weight_version="initial", abort_all_requests=True
    )
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model_path": ""},
        {"load_format": "dummy"},
        {"is_async": True},
        {"keep_pause": True},
        {"manifest": {"a": 1}},
    ],
)
async def test_an_update_that_cannot_be_honoured_changes_nothing(
    client: httpx.AsyncClient, engine: InferenceEngine, model: Path, body: dict[str, object]
) -> None:
    given = {"model_path": str(model), **body} if body else {}
    response = await client.post("/update_weights_from_disk", json=given)
    assert (response.status_code, response.json()["success"]) == (400, False)
    assert engine.get_weight_version() == "initial"


async def test_a_tensor_is_read_by_its_name(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    tensor = await engine.get_weights_by_name("model.norm.weight")
    expected = list(struct.unpack("<3f", tensor.data[:12]))
    for method in ("GET", "POST"):
        response = await client.request(
            method, "/get_weights_by_name", json={"name": "model.norm.weight", "truncate_size": 3}
        )
        assert response.json() == pytest.approx(expected)
    rows = await ok(client, "/get_weights_by_name", name="model.embed_tokens.weight", truncate_size=2)
    assert len(rows) == 2
    assert all(isinstance(one, float) for row in rows for one in row)
    assert (await client.post("/get_weights_by_name", json={"name": "nothing"})).status_code == 400


@pytest.mark.parametrize("path", TENSOR_ROUTES)
async def test_pickles_and_handles_are_refused(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"serialized_named_tensors": ["gASVAAAA"]})
    assert (response.status_code, response.json()["success"]) == (501, False)


async def test_adapters_are_loaded_replaced_and_unloaded(
    sglang: httpx.AsyncClient, engine: InferenceEngine, adapters: Path
) -> None:
    one, two = (str(adapters / name) for name in ("one", "two"))
    found = []
    for path in (one, two):
        body = await ok(sglang, "/load_lora_adapter", lora_name="fresh", lora_path=path)
        assert (body["success"], body["loaded_adapters"]) == (True, {"fresh": path})
        answer = await ok(sglang, "/generate", input_ids=[5, 6], lora_path="fresh", sampling_params={"temperature": 0})
        found.append(answer["output_ids"])
    assert found[0] != found[1], "a name that is taken gets the new weights"
    missing = await sglang.post("/load_lora_adapter", json={"lora_name": "none", "lora_path": "/nowhere"})
    assert (missing.status_code, missing.json()["success"]) == (400, False)
    assert (await ok(sglang, "/unload_lora_adapter", lora_name="fresh"))["loaded_adapters"] == {}
    gone = await sglang.post("/unload_lora_adapter", json={"lora_name": "fresh"})
    assert (gone.status_code, gone.json()["success"]) == (400, False)
    await engine.update_weight_version("initial")


# Paths that both dialects have ---------------------------------------------------------------------------------------


async def test_the_dialect_decides_whose_answer_a_shared_path_gives(
    client: httpx.AsyncClient, sglang: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    for one, dialect in ((client, "vllm"), (sglang, "sglang")):
        assert (await one.get("/v1/models")).json()["data"][0]["owned_by"] == dialect
    assert (await ok(client, "/detokenize", tokens=[104, 105])) == {"prompt": "hi"}
    assert (await ok(sglang, "/detokenize", tokens=[104, 105])) == {"text": "hi"}
    assert (await ok(client, "/v1/detokenize", tokens=[[104], [105]])) == {"text": ["h", "i"]}
    assert (await ok(sglang, "/tokenize", prompt=["a", "bc"]))["count"] == [1, 2]
    assert (await ok(sglang, "/tokenize", messages=[{"role": "user", "content": "a"}]))["count"] > 1


async def test_errors_of_openais_routes_follow_the_dialect(
    client: httpx.AsyncClient, sglang: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    wrong = {"prompt": [5], "temperature": -1}
    assert (await client.post("/v1/completions", json=wrong)).json()["error"]["code"] == 400
    body = (await sglang.post("/v1/completions", json=wrong)).json()
    assert (body["object"], body["code"], body["param"]) == ("error", 400, "temperature")
    assert isinstance(body["message"], str)
    nowhere = await sglang.get("/nowhere")
    assert (nowhere.status_code, nowhere.json()["type"]) == (404, "404")


async def test_sglangs_fields_of_openais_requests_are_honoured(
    client: httpx.AsyncClient, sglang: httpx.AsyncClient, engine: InferenceEngine, adapters: Path
) -> None:
    asked = {"prompt": [5, 6], "max_tokens": 8, "temperature": 0}
    plain = await ok(sglang, "/v1/completions", **asked)
    named = await ok(sglang, "/v1/completions", **asked, rid="mine", lora_path=None, regex=None, no_stop_trim=False)
    assert (named["id"], named["choices"][0]["text"]) == ("cmpl-mine", plain["choices"][0]["text"])
    await ok(sglang, "/load_lora_adapter", lora_name="fresh", lora_path=str(adapters / "one"))
    texts = [
        (await ok(sglang, "/v1/completions", **asked, **adapter))["choices"][0]["text"]
        for adapter in ({"lora_path": "fresh"}, {"model": "policy:fresh"}, {"model": "fresh"})
    ]
    assert texts == [texts[0]] * 3
    assert texts[0] != plain["choices"][0]["text"]
    await ok(sglang, "/unload_lora_adapter", lora_name="fresh")
    for refused in (
        {"custom_logit_processor": "00"},
        {"no_stop_trim": True},
        {"session_params": {"id": "s"}},
        {"custom_params": {"return_top_p_token_ids": True}},
    ):
        (name,) = refused
        for path, more in (
            ("/v1/completions", asked),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            response = await sglang.post(path, json={**more, **refused})
            assert response.status_code == 400
            assert response.json()["param"].startswith(name)
    unknown = await sglang.post("/v1/completions", json={**asked, "model": "policy:nobody"})
    assert unknown.status_code == 404


async def test_options_of_no_stream_are_ignored_in_sglangs_dialect(
    sglang: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    options = {"stream_options": {"include_usage": True}, "max_tokens": 2}
    await ok(sglang, "/v1/completions", prompt=[5], **options)
    await ok(sglang, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **options)


@pytest.mark.parametrize("effort", ["none", "low", 0.5])
async def test_an_effort_needs_no_template_that_reads_it(sglang: httpx.AsyncClient, effort: object) -> None:
    asked = {"max_tokens": 2, "reasoning_effort": effort}
    messages = [{"role": "user", "content": "a"}]
    await ok(sglang, "/v1/completions", prompt=[5], **asked)
    await ok(sglang, "/v1/chat/completions", messages=messages, **asked)
    await ok(sglang, "/sessions/effort/v1/chat/completions", messages=messages, **asked)


async def test_sglangs_templates_that_read_thinking_are_told_not_to(
    served: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ServedEngine(served, ServerConfig())
    monkeypatch.setattr(served.tokenizer.inner, "chat_template", "{{ thinking }}")
    for given, expected in (({}, {"thinking": False}), ({"thinking": True}, {"thinking": True})):
        body = {"messages": [], "reasoning_effort": "none", "chat_template_kwargs": given}
        assert translated(body, engine)["chat_template_kwargs"] == expected


async def test_a_profile_is_recorded(client: httpx.AsyncClient, engine: InferenceEngine, tmp_path: Path) -> None:
    if not engine.supports("profile"):
        assert (await client.post("/start_profile", json={})).status_code == 400
        return
    assert (await client.post("/start_profile", json={"num_steps": 3})).status_code == 400
    assert (await client.post("/start_profile", json={"output_dir": 3})).status_code == 400
    assert (await client.post("/start_profile", json={"output_dir": str(tmp_path)})).status_code == 200
    await ids(client)
    assert str(tmp_path) in (await client.get("/stop_profile")).text


async def test_a_new_label_ends_requests_in_sglangs_dialect_only(
    client: httpx.AsyncClient, sglang: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    for one, keeps, more in (
        (client, True, {}),
        (client, False, {"abort_all_requests": True}),
        (sglang, False, {}),
        (sglang, True, {"abort_all_requests": False}),
    ):
        running = asyncio.create_task(ok(client, "/generate", **LONG))
        await until_running(engine, 1)
        assert (await ok(one, "/update_weight_version", new_version="8", **more))["new_version"] == "8"
        reason = (await running)["meta_info"]["finish_reason"]["type"]
        assert reason == ("length" if keeps else "abort")
    await engine.update_weight_version("initial")


async def test_the_control_key_guards_sglangs_control_routes(engine: InferenceEngine) -> None:
    api, control = "a-key-for-requests", "a-key-for-weights!"
    async with Server(engine, ServerConfig(port=0, api_key=api, control_key=control)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:

            async def status(path: str, key: str) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                return (await client.post(path, json={}, headers=headers)).status_code

            for path in (
                *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"),
                *("/release_memory_occupation", "/update_weights_from_disk", "/get_weights_by_name"),
                *("/weights_checker", "/start_profile", "/unload_lora_adapter", *TENSOR_ROUTES),
            ):
                assert await status(path, api) == 401, path
            assert await status("/continue_generation", control) == 200
            assert await status("/generate", api) == 400
            assert (await client.post("/generate", json={})).status_code == 401
            assert (await client.get("/health_generate")).status_code == 200
