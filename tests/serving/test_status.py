"""The status page, and the facts that it shows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from drivetrain import InferenceEngine, PauseMode, create_engine
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.status.routes import policy_of
from drivetrain_serving.traffic import Traffic
from engines import HANGING, until_running
from fleets import fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "a-key-for-requests"
TOKENS = {"ignore_eos": True, "max_tokens": 8}


async def test_every_route_that_generates_is_counted(engine: InferenceEngine) -> None:
    sglang: dict[str, object] = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], **TOKENS}
    tokens: dict[str, object] = {"token_ids": [5, 6], "sampling_params": TOKENS}
    asked: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": [5, 6], "n": 3, **TOKENS}),
        ("/v1/completions", {"prompt": [5, 6], "stream": True, **TOKENS}),
        ("/v1/chat/completions", chat),
        ("/inference/v1/generate", tokens),
        ("/inference/v1/generate", {**tokens, "stream": True}),
        ("/generate", sglang),
        ("/generate", {**sglang, "stream": True}),
        ("/sessions/one/v1/chat/completions", chat),
        ("/sessions/two/v1/chat/completions", {**chat, "stream": True}),
    ]
    async with Server(engine, ServerConfig(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            expected, facts = 0, {}
            for path, body in asked:
                response = await client.post(path, json=body)
                assert response.status_code == 200, response.text
                expected += 24 if body.get("n") else 8
                facts = (await client.get("/status")).json()
                assert facts["generated_tokens"] == expected, path
            assert facts["tokens_per_second"] > 0
            assert facts["uptime_seconds"] > 0
            assert facts["engines"] == []


async def test_the_state_is_told_also_of_an_engine_that_was_closed(model: Path) -> None:
    engine = create_engine("transformers", model=str(model))
    await engine.start()
    async with Server(engine, ServerConfig(port=0, served_model_name=("policy",))) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await until_running(engine, 1)
            await engine.pause_generation(PauseMode.IN_PLACE)
            facts = (await client.get("/status")).json()
            assert (facts["state"], facts["running"], facts["waiting"]) == ("paused", 1, 0)
            assert (facts["model"], facts["backend"]) == ("policy", "transformers")
            assert facts["weight_version"] == "initial"
            await engine.continue_generation()
            assert (await asking).status_code == 200
            await engine.teardown()
            facts = (await client.get("/status")).json()
            assert (facts["state"], facts["running"], facts["waiting"]) == ("closed", None, None)


async def test_the_engines_of_a_fleet_are_told_apart(model: Path) -> None:
    async with fleet_of(2, model) as fleet, Server(fleet, ServerConfig(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            await client.post("/v1/completions", json={"prompt": [[5, 6]] * 4, **TOKENS})
            await client.post("/update_weight_version", json={"new_version": "step-7"})
            engines = (await client.get("/status")).json()["engines"]
    assert [(one["name"], one["state"], one["weight_version"]) for one in engines] == [
        ("engine-0", "ready", "step-7"),
        ("engine-1", "ready", "step-7"),
    ]
    assert sum(one["generated_tokens"] for one in engines) == 32


async def test_the_page_needs_no_key_and_the_facts_do(engine: InferenceEngine) -> None:
    config = ServerConfig(port=0, api_key=KEY, served_model_name=("a-name",))
    async with Server(engine, config) as server, httpx.AsyncClient(base_url=server.url) as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert "a-name" not in page.text
        assert (await client.get("/status")).status_code == 401
        answer = await client.get("/status", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.json()["model"] == "a-name"
        assert answer.headers["cache-control"] == "no-store"


async def test_the_page_loads_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy == policy_of(page.text)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "//" not in page.text.replace("// Values", ""), "an address"
    assert "innerHTML" not in page.text


async def test_a_rate_is_that_of_the_last_minute() -> None:
    traffic = Traffic(now=100.0)
    traffic.add(50, now=100.5)
    assert traffic.per_second(now=100.6) == 50, "at least a second counts"
    traffic.add(30, now=110.0)
    assert traffic.per_second(now=120.0) == 4
    assert traffic.per_second(now=165.0) == 0.5
    assert traffic.per_second(now=171.0) == 0
    assert traffic.generated == 80
