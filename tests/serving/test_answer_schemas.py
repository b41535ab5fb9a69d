"""Real answers of every route against the OpenAPI document, whose objects have no other fields than it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from documented_answers import Document
from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig, SessionConfig
from drivetrain_serving.sglang.routes import TENSOR_ROUTES
from drivetrain_serving.vllm.weight_transfer import GROUP
from engines import HANGING, until_running
from scripted_backend import CALL, scripted_engine
from trainer_groups import Trainer, a_group, rpc, send_as_skyrl, send_as_trl, tensors_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

IDS = [5, 6, 7]
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
MESSAGES = [{"role": "user", "content": "add"}]
REFUSING = {"/start_draft_weight_update", "/fetch_weights", *TENSOR_ROUTES}
"""Routes that answer no request with 200."""
ELSEWHERE = {"/v1/embeddings", "/init_weight_transfer_engine", "/start_profile", "/stop_profile"}
"""Routes whose answers with 200 need an engine of another task, two GPUs, or an engine that profiles."""


@dataclass
class Site:
    """A server whose every answer is compared with its document."""

    client: httpx.AsyncClient
    document: Document
    engine: InferenceEngine
    faults: list[str] = field(default_factory=list)

    async def compare(self, response: httpx.Response) -> None:
        """Compare an answer with the document; the client calls this for each."""
        await response.aread()
        self.faults += [
            f"{response.request.method} {response.url.path}: {one}" for one in self.document.errors(response)
        ]

    async def ask(self, method: str, path: str, status: int = 200, **more: Any) -> httpx.Response:
        """Return an answer that has this status and is as the document says."""
        response = await self.client.request(method, path, **more)
        assert response.status_code == status, (path, response.text)
        assert self.faults == [], response.text
        return response

    async def post(self, path: str, status: int = 200, /, **body: Any) -> httpx.Response:
        return await self.ask("POST", path, status, json=body)

    async def get(self, path: str, status: int = 200, **more: Any) -> httpx.Response:
        return await self.ask("GET", path, status, **more)


@pytest_asyncio.fixture(loop_scope="session", params=["vllm", "sglang"])
async def site(
    request: pytest.FixtureRequest, served: InferenceEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    """A server of each dialect that takes its engine for one with a GPU."""
    monkeypatch.setattr(type(served), "gpus", property(lambda self: ("GPU-of-the-test",)))
    config = ServerConfig(port=0, dialect=request.param, served_model_name=("policy",))
    async with (
        Server(served, config) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client,
    ):
        yield await site_of(client, served)
    await served.load_weights_from_disk(str(model), "initial")
    await served.continue_generation()


async def site_of(client: httpx.AsyncClient, engine: InferenceEngine) -> Site:
    site = Site(client, Document((await client.get("/openapi.json")).json()), engine)
    client.event_hooks = {"response": [site.compare]}
    return site


async def test_every_answer_is_as_the_document_says(
    site: Site, trainer: Trainer, model: Path, other_model: Path, adapters: Path
) -> None:
    await ask_for_descriptions(site)
    await ask_for_tokens(site)
    await ask_for_text(site)
    await ask_by_sglangs_route(site)
    await ask_sessions(site)
    await pause_and_sleep(site)
    await load_adapters(site, adapters)
    await change_weights(site, trainer, model, other_model)
    for method in ("GET", "POST"):
        for path in ("/start_profile", "/stop_profile"):
            await site.ask(method, path, 400)
    answered = {(method, path) for method, path, status in site.document.seen if status in (200, 204)}
    silent = {one for one in site.document.operations if one not in answered}
    assert {path for _, path in silent} == REFUSING | ELSEWHERE
    refused = {path for _, path, status in site.document.seen if status >= 400}
    assert refused >= REFUSING
    assert site.faults == []


async def ask_for_descriptions(site: Site) -> None:
    for path in ("/", "/openapi.json", "/health", "/health_generate", "/ready", "/version", "/metrics", "/status"):
        await site.get(path)
    for path in ("/v1/models", "/load", "/server_info", "/get_server_info", "/get_world_size", "/weight_info"):
        await site.get(path)
    for path in ("/model_info", "/get_model_info", "/weight_version", "/get_weight_version", "/v1/loads"):
        await site.get(path)


async def ask_for_tokens(site: Site) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        await site.post(path, prompt="some text")
        await site.post(path, messages=MESSAGES, return_token_strs=True)
    await site.post("/v1/tokenize", prompt=["some", "texts"])
    for path in ("/detokenize", "/v1/detokenize"):
        await site.post(path, tokens=IDS)
        await site.post(path, 400, tokens="text")
    await site.post("/v1/detokenize", tokens=[IDS, IDS])
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, streamed):
        await site.post("/v1/completions/render", prompt=[IDS, IDS], **more)
        await site.post("/v1/chat/completions/render", messages=MESSAGES, **more)
    generated = {"request_id": "r", "choices": [{"token_ids": IDS, "finish_reason": "length"}]}
    for path, name in (("/v1/completions", "generate_responses"), ("/v1/chat/completions", "generate_response")):
        await site.post(f"{path}/derender", **{name: [generated] if name.endswith("s") else generated})
        chunk = (await site.post(f"{path}/derender", stream=True, generate_chunk=generated)).json()
        state = chunk["stream_state"]
        await site.post(f"{path}/derender", stream=True, generate_chunk=generated, stream_state=state)
        await site.post(f"{path}/derender", 400)
    await site.post("/v1/completions/render", 404, prompt=IDS, model="nobody")
    await site.post("/v1/chat/completions/render", 400, messages=[])


async def ask_for_text(site: Site) -> None:
    whole: list[dict[str, Any]] = [
        {},
        {"logprobs": 0, "n": 2, "temperature": 1.0},
        {"logprobs": 2, "echo": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"stop": ["a"], "max_tokens": 40, "include_stop_str_in_output": True},
    ]
    for more in whole:
        await site.post("/v1/completions", prompt=[IDS, IDS], **{**SHORT, **more})
    streamed: list[dict[str, Any]] = [
        {},
        {"logprobs": 2, "return_token_ids": True, "stream_options": {"include_usage": True}},
    ]
    for more in ({"echo": True}, {"echo": True, "logprobs": 2, "n": 2, "temperature": 1.0}, {"logprobs": -1}):
        await site.post("/v1/completions", prompt=[IDS, IDS], stream=True, **{**SHORT, **more})
    for more in streamed:
        await site.post("/v1/completions", prompt=IDS, stream=True, **SHORT, **more)
        more = {**more, "logprobs": "logprobs" in more, "messages": MESSAGES}
        await site.post("/v1/chat/completions", stream=True, **SHORT, **more)
    chats: list[dict[str, Any]] = [
        {},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True},
        {"prompt_logprobs": 1, "n": 2},
        {"prompt_logprobs": -1, "logprobs": True, "top_logprobs": -1},
    ]
    for more in chats:
        await site.post("/v1/chat/completions", messages=MESSAGES, **{**SHORT, **more})
    params = {**SHORT, "logprobs": 2, "prompt_logprobs": 1, "n": 2, "temperature": 1.0}
    await site.post("/inference/v1/generate", token_ids=IDS, sampling_params=params, return_token_ids=True)
    support = {"sampling_params": {**SHORT, "top_k": 2, "temperature": 1.0}, "return_sample_support": True}
    await site.post("/skyrl/v1/generate", token_ids=IDS, **support)
    params = {**SHORT, "logprobs": 0}
    await site.post(
        "/inference/v1/generate",
        token_ids=IDS,
        sampling_params=params,
        stream=True,
        stream_options={"include_usage": True},
    )
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        await site.post(path, 400, sampling_params={}, prompt=7, messages=7)
        await site.post(path, 404, token_ids=IDS, sampling_params={}, prompt=IDS, messages=MESSAGES, model="absent")
        await site.ask("POST", path, 400, content=b"[1", headers={"content-type": "application/json"})
    await site.post("/v1/embeddings", 501, input="text")


async def ask_by_sglangs_route(site: Site) -> None:
    params = {"max_new_tokens": 4, "temperature": 0}
    for more in (
        {},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True},
        {"return_prompt_token_ids": True, "sampling_params": {**params, "n": 2, "temperature": 1.0}},
    ):
        body: dict[str, Any] = {"sampling_params": params, **more}
        await site.post("/generate", input_ids=IDS, **body)
        await site.ask("PUT", "/generate", json={"input_ids": [IDS, IDS], **body})
        await site.post("/generate", input_ids=IDS, stream=True, **body)
    await site.post("/generate", 400, input_ids=IDS, sampling_params={"unknown": 1})
    await site.post("/generate", 400, input_ids=IDS, lora_path="absent")


async def ask_sessions(site: Site) -> None:
    for path, body, length in (
        ("chat/completions", {"messages": MESSAGES}, "max_tokens"),
        ("messages", {"messages": MESSAGES, "model": "policy"}, "max_tokens"),
        ("responses", {"input": "add", "instructions": "be short", "metadata": {"a": "b"}}, "max_output_tokens"),
    ):
        at = f"/sessions/a/v1/{path}"
        for stream in (False, True):
            asked: dict[str, Any] = {**body, "temperature": 0, "stream": stream}
            await site.post(at, **asked, **{length: 4})
        await site.post(at, 400, **{**body, "temperature": -1, length: 4})
        await site.post(at, 404, **{**body, "model": "absent", length: 4})
        await site.ask("POST", at, 400, content=b"[1", headers={"content-type": "application/json"})
    await site.post("/sessions/a/v1/messages", 400, messages=MESSAGES, model="policy", max_tokens=4, thread={"id": "a"})
    await site.post("/sessions/a/v1/messages/count_tokens", messages=MESSAGES, model="policy")
    await site.get("/sessions/a/v1/models")
    await site.get("/sessions")
    trajectory = await site.get("/sessions/a/trajectory")
    assert len(trajectory.json()["turns"]) == 6
    await site.get("/sessions/absent/trajectory", 404)
    await site.ask("DELETE", "/sessions/a", 204)
    await site.ask("DELETE", "/sessions/a", 404)


async def pause_and_sleep(site: Site) -> None:
    await site.post("/pause?mode=keep")
    await site.get("/is_paused")
    await site.post("/pause?mode=unknown", 400)
    await site.post("/resume")
    await site.post("/pause_generation", mode="in_place")
    await site.post("/pause_generation", 400, mode="unknown")
    await site.post("/continue_generation")
    await site.post("/abort_requests")
    await site.post("/abort_requests", request_ids=["absent"])
    await site.post("/abort_requests", 400, request_ids=7)
    await site.post("/inference/v1/abort_requests", request_ids=["absent"])
    await site.post("/inference/v1/abort_requests", 400)
    await site.post("/abort_request", rid="absent")
    await site.post("/release_kv_cache_memory", 400)
    await site.post("/pause")
    await site.post("/release_kv_cache_memory")
    await site.post("/wake_up")
    await site.post("/sleep?level=0")
    await site.get("/is_sleeping")
    await site.post("/wake_up?tags=scheduling")
    await site.post("/sleep?level=7", 400)
    running = asyncio.create_task(
        site.post("/v1/completions", prompt=IDS, max_tokens=900, temperature=0, ignore_eos=True)
    )
    await until_running(site.engine, 1)
    for method in ("GET", "POST"):
        await site.ask(method, "/flush_cache", 400)
    await site.post("/abort_requests")
    await running
    for method in ("GET", "POST"):
        await site.ask(method, "/flush_cache")
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            await site.ask(method, path, json={"tags": ["kv_cache"]})
            await site.ask(method, path, 400, json={"tags": 7})
    for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
        await site.post(path)


async def load_adapters(site: Site, adapters: Path) -> None:
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
        await site.post(path, lora_name="adapter", lora_path=str(adapters / "one"), load_inplace=True)
        await site.ask("POST", path, 400, json={"lora_path": "/absent"})
    await site.get("/v1/models")
    await site.post("/unload_lora_adapter", lora_name="adapter")
    await site.post("/unload_lora_adapter", 400, lora_name="adapter")
    await site.post("/v1/load_lora_adapter", lora_name="adapter", lora_path=str(adapters / "one"))
    await site.post("/v1/unload_lora_adapter", lora_name="adapter")
    await site.post("/v1/unload_lora_adapter", 404, lora_name="adapter")


async def change_weights(site: Site, trainer: Trainer, model: Path, other_model: Path) -> None:
    tensors = tensors_of(other_model)
    for method in ("GET", "POST"):
        name = {"name": tensors[0]["name"], "truncate_size": 2}
        await site.ask(method, "/get_weights_by_name", json=name)
        await site.ask(method, "/get_weights_by_name", 400, json={"name": "absent"})
        for action in ("checksum", "snapshot", "compare", "reset_tensors"):
            await site.ask(method, "/weights_checker", json={"action": action})
        await site.ask(method, "/weights_checker", 400, json={"action": "compare"})
    checksums = (await site.post("/weight_checker", action="checksum")).json()["checksums"]
    await site.post("/weight_checker", action="compare", baseline=checksums)
    await site.post("/weight_checker", action="reset")
    await site.post("/weight_checker", 400)
    for path in TENSOR_ROUTES:
        await site.post(path, 501)
    await site.post("/start_draft_weight_update", 501)
    await site.post("/fetch_weights", 501, target_version=1)
    await site.post("/update_weight_version", new_version="a")
    await site.post("/update_weight_version", 400)
    await site.post("/update_weights", weight_dir=str(other_model))
    await site.post("/update_weights", 400)
    await site.post("/update_weights_from_disk", model_path=str(model))
    await site.post("/update_weights_from_disk", 400)
    async with a_group(trainer, site.client, name=GROUP) as group:
        for path in ("/start_weight_update", "/begin_weight_update"):
            await site.post(path)
            await site.post(path, 400)
            await send_as_trl(group, other_model, tensors)
            await site.post("/finish_weight_update" if path == "/start_weight_update" else "/end_weight_update")
        for path in ("/finish_weight_update", "/end_weight_update"):
            await site.post(path, 400)
        await rpc(site.client, "skyrl_start_weight_update")
        await send_as_skyrl(group, other_model, tensors)
        await site.post("/collective_rpc", method="skyrl_finish_weight_update")
        await site.post("/collective_rpc", 501, method="unknown")
        await site.post("/collective_rpc", 400, method="skyrl_set_lora_receive_target")
        await site.post("/collective_rpc", method="skyrl_discard_in_memory_lora", args=["absent"])
        await site.post("/skyrl/v1/load_lora_adapter", 400, lora_name="absent", in_memory=True)
        await group.send(other_model, [{**tensors[0], "name": "absent"}])
        answer, _ = await group.send(other_model, tensors[:2])
        assert answer.status_code == 200
        await site.post("/shutdown_weight_transfer_engine")
        await site.post("/shutdown_weight_transfer_engine", 400)
        await site.post("/init_weight_transfer_engine", 400)
    async with a_group(trainer, site.client):
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_as_the_document_says(model: Path, tmp_path: Path, stream: bool) -> None:
    schema: dict[str, Any] = {"type": "object"}
    function = {"name": "add", "parameters": schema}
    tools: dict[str, list[dict[str, Any]]] = {
        "chat/completions": [{"type": "function", "function": function}],
        "messages": [{"name": "add", "input_schema": schema}],
        "responses": [{"type": "function", **function}],
    }
    async with (
        scripted_engine(model, tmp_path / "model") as (engine, backend),
        Server(engine, ServerConfig(port=0, sessions=SessionConfig(routed_experts=True))) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client,
    ):
        site = await site_of(client, engine)
        backend.says = ["So: " + CALL + CALL] * 4
        for path, given in [*((f"sessions/a/v1/{one}", one) for one in tools), ("v1/chat/completions",) * 2]:
            asked: dict[str, Any] = {"messages": MESSAGES, "input": "add", "max_tokens": 900, "stream": stream}
            if given == "responses":
                asked["max_output_tokens"] = asked.pop("max_tokens")
            answer = await site.post(f"/{path}", tools=tools[given.removeprefix("v1/")], **asked)
            assert "add" in answer.text, "the tool is called"
        trajectory = (await site.get("/sessions/a/trajectory")).json()
        assert all(turn["routed_experts"] for turn in trajectory["turns"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": IDS, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_a_wrong_field_is_found(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    document = Document((await client.get("/openapi.json")).json())
    answer = (await client.post(path, json={**SHORT, **body})).json()
    schema = document.schema_of("POST", path)
    assert [*document.violations(answer, schema)] == []
    wrong = [*spoilt(answer)]
    assert len(wrong) > 60
    for one in wrong:
        assert [*document.violations(one, schema)], one


def spoilt(value: Any) -> Iterator[Any]:
    """Yield copies of an answer, each with one field left out, of another type, or added."""
    if isinstance(value, dict):
        yield {**value, "unknown": 1}
        for name, one in value.items():
            yield {other: value[other] for other in value if other != name}
            yield {**value, name: object}
            yield from ({**value, name: changed} for changed in spoilt(one))
    if isinstance(value, list):
        yield from ([changed, *value[1:]] for one in value[:1] for changed in spoilt(one))
