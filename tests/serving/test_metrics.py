"""Metrics: each series says what was done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from drivetrain import InferenceEngine, create_engine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING, until, until_running
from fleets import fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

EIGHT: dict[str, object] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True}
FORTY = list(range(5, 45))


class Watched:
    """A server's client that reads all metrics after each call, and sees that no counter falls."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.now: dict[str, float] = {}

    async def post(self, path: str, **body: object) -> httpx.Response:
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        await self.read()
        return response

    async def read(self) -> None:
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.client.get("/metrics")).text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                found[name] = sample.value
                if family.type == "counter":
                    assert sample.value >= self.now.get(name, 0.0), f"{name} fell"
        assert self.now.keys() - found.keys() <= {one for one in self.now if "_info{" in one}
        self.now = found

    def __getitem__(self, name: str) -> float:
        return self.now[f"drivetrain_{name}"]

    def of(self, *names: str) -> list[float]:
        return [self[name] for name in names]


@asynccontextmanager
async def watched(engine: InferenceEngine) -> AsyncIterator[Watched]:
    async with Server(engine, ServerConfig(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            found = Watched(client)
            await found.read()
            yield found


@pytest.fixture
def fresh(model: Path) -> InferenceEngine:
    return create_engine("transformers", model=str(model), isolation="inline", enable_lora=True)


async def test_tokens_hits_and_ends_are_those_of_the_requests(fresh: InferenceEngine) -> None:
    tokens = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hit_tokens_total")
    async with fresh, watched(fresh) as seen:
        assert seen.of(*tokens) == [0, 0, 0]
        await seen.post("/v1/completions", prompt=FORTY, **EIGHT)
        assert seen.of(*tokens) == [40, 8, 0]
        answer = await seen.post("/v1/completions", prompt=FORTY, **EIGHT)
        hits = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < hits < 40
        assert seen.of(*tokens) == [80, 16, hits]
        await seen.post("/v1/completions", prompt=[[5], [6, 7]], n=2, stream=True, **EIGHT)
        assert seen.of(*tokens)[:2] == [86, 48], "each sample reads its prompt"
        sampling = {"max_new_tokens": 8, "ignore_eos": True}
        await seen.post("/generate", input_ids=[5, 6], sampling_params=sampling, stream=True)
        assert seen.of(*tokens)[:2] == [88, 56]
        await seen.post("/v1/completions", prompt=FORTY, stop_token_ids=list(range(260)), max_tokens=8)
        assert seen["generation_tokens_total"] == 57, "every token ends it"
        assert seen["completions_total{finish_reason=length}"] == 7
        assert seen["completions_total{finish_reason=stop}"] == 1
        assert seen["completions_total{finish_reason=error}"] == 0


async def test_requests_that_end_early_are_told_apart(fresh: InferenceEngine) -> None:
    async with fresh, watched(fresh) as seen:
        running = asyncio.create_task(seen.client.post("/v1/completions", json=LONG))
        await until_running(fresh, 1)
        await seen.read()
        assert seen.of("requests_running", "requests_waiting") == [1, 0]
        await seen.post("/pause?mode=abort")
        assert (await running).status_code == 200
        waiting = asyncio.create_task(seen.client.post("/v1/completions", json=LONG))
        await until(lambda: fresh.parts.in_flight.waiting == 1)
        await seen.read()
        assert seen["completions_total{finish_reason=abort}"] == 1
        assert seen["prompt_tokens_total"] == 2, "the one that waits has not been read"
        waiting.cancel()
        await until(lambda: fresh.parts.in_flight.waiting == 0)
        await seen.post("/resume")
        assert seen["completions_total{finish_reason=abort}"] == 2
        assert seen["requests_running"] == 0
        refused = await seen.client.post("/v1/completions", json={**LONG, "max_tokens": -1})
        assert refused.status_code == 400
        await seen.read()
        assert sum(value for name, value in seen.now.items() if name.startswith("drivetrain_completions_total")) == 2


async def test_pauses_sleeps_and_updates_are_counted_with_their_seconds(
    fresh: InferenceEngine, model: Path, other_model: Path
) -> None:
    async with fresh, watched(fresh) as seen:
        sent = time.monotonic()
        await seen.client.post("/pause?mode=abort")
        paused = time.monotonic()
        await seen.post("/pause?mode=keep")
        assert seen.of("state{state=paused}", "state{state=ready}") == [1, 0]
        resumes = time.monotonic()
        await seen.post("/resume")
        resumed = time.monotonic()
        assert seen["pauses_total"] == 1, "a second pause within the first changes its mode"
        assert resumes - paused <= seen["pause_seconds_total"] <= resumed - sent
        held = seen["pause_seconds_total"]
        await seen.read()
        assert seen["pause_seconds_total"] == held
        awake = seen["weight_bytes"]
        assert awake > 0
        for _ in range(2):
            await seen.post("/release_memory_occupation")
            assert seen.of("sleeps_total", "state{state=asleep}") == [1, 1], "a second sleep within the first is none"
            assert seen["weight_bytes"] < awake / 100, "only buffers that no checkpoint holds are kept"
            assert seen["kv_cache_bytes"] == 0
        slept = seen["sleep_seconds_total"]
        await seen.post("/resume_memory_occupation")
        assert seen["sleep_seconds_total"] > slept
        slept = seen["sleep_seconds_total"]
        await seen.post("/resume_memory_occupation")
        assert seen.of("sleeps_total", "sleep_seconds_total", "weight_bytes") == [1, slept, awake]
        assert seen["pauses_total"] == 1
        await seen.post("/update_weights", weight_dir=str(other_model), weight_version="step-1")
        assert seen["weight_info{version=step-1}"] == 1
        assert seen["weight_updates_total{outcome=committed}"] == 1
        spent = seen["weight_update_seconds_total"]
        assert spent > 0
        await seen.post("/update_weights", weight_dir=str(model), weight_version="step-1")
        assert seen["weight_updates_total{outcome=committed}"] == 2, "also if the label stays"
        assert seen["weight_update_seconds_total"] > spent
        assert seen["weight_updates_total{outcome=failed}"] == 0


async def test_an_update_that_breaks_is_counted_as_failed(fresh: InferenceEngine, model: Path) -> None:
    async def break_off(*args: object) -> None:
        raise RuntimeError("the disk is gone")

    async with fresh, watched(fresh) as seen:
        applying = fresh.parts.backend.apply_weights
        fresh.parts.backend.apply_weights = break_off  # type: ignore[method-assign, assignment]
        broken = await seen.client.post("/update_weights", json={"weight_dir": str(model), "weight_version": "a"})
        assert broken.status_code == 500
        await seen.read()
        outcomes = ("weight_updates_total{outcome=committed}", "weight_updates_total{outcome=failed}")
        assert seen.of(*outcomes, "state{state=dirty}") == [0, 1, 1]
        fresh.parts.backend.apply_weights = applying  # type: ignore[method-assign]
        await seen.post("/update_weights", weight_dir=str(model), weight_version="b")
        assert seen.of(*outcomes, "state{state=ready}") == [1, 1, 1]


async def test_requests_are_counted_by_route_and_status(fresh: InferenceEngine) -> None:
    async with fresh, watched(fresh) as seen:

        def counted(route: str, status: int) -> float:
            return seen.now.get(f"drivetrain_http_requests_total{{route={route},status={status}}}", 0)

        for stream in (False, True):
            await seen.post("/v1/completions", prompt=[5, 6], stream=stream, **EIGHT)
        await seen.client.post("/v1/completions", json={"prompt": [5], "max_tokens": -1})
        await seen.client.get("/v1/completions")
        for session in ("one", "two"):
            await seen.client.get(f"/sessions/{session}/trajectory")
        for path in ("/nowhere", "/sessions/one/nowhere", "/health/"):
            await seen.client.get(path)
        await seen.read()
        assert counted("/metrics", 200) == 3, "the answer that brings the counts is not in them"
        assert [counted("/v1/completions", status) for status in (200, 400, 405)] == [2, 1, 1]
        assert counted("/sessions/{session}/trajectory", 404) == 2
        assert (counted("unknown", 404), counted("unknown", 307)) == (2, 1)
        assert not any("one" in name or "nowhere" in name for name in seen.now if "http_requests" in name)


async def test_requests_that_get_no_answer_of_a_route_are_counted_too(fresh: InferenceEngine) -> None:
    async def broken(*args: object) -> None:
        raise RuntimeError("a bug")

    key = "0123456789abcdef"
    async with fresh, Server(fresh, ServerConfig(port=0, control_key=key)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/pause")).status_code == 401
            fresh.continue_generation = broken  # type: ignore[method-assign]
            assert (await client.post("/resume", headers={"x-api-key": key})).status_code == 500
            text = (await client.get("/metrics")).text
    assert 'drivetrain_http_requests_total{route="/pause",status="401"} 1.0' in text
    assert 'drivetrain_http_requests_total{route="/resume",status="500"} 1.0' in text


async def test_adapters_are_counted(fresh: InferenceEngine, adapters: Path) -> None:
    async with fresh, watched(fresh) as seen:
        assert seen["lora_adapters"] == 0
        await seen.post("/v1/load_lora_adapter", lora_name="one", lora_path=str(adapters / "one"))
        assert seen.of("lora_adapters", "engine_lora_adapters{engine=engine-0}") == [1, 1]
        await seen.post("/v1/unload_lora_adapter", lora_name="one")
        assert seen["lora_adapters"] == 0


async def test_each_engine_of_a_fleet_has_its_own(model: Path, other_model: Path) -> None:
    names = ("engine-0", "engine-1")
    async with fleet_of(2, model) as fleet, watched(fleet) as seen:

        def each(name: str, more: str = "") -> list[float]:
            return [seen[f"engine_{name}{{engine={one}{more}}}"] for one in names]

        for _ in range(4):
            await seen.post("/v1/completions", prompt=[[5, 6], [7, 8, 9]], n=2, **EIGHT)
        for name, total in (("prompt_tokens_total", 40), ("generation_tokens_total", 128)):
            assert seen[name] == sum(each(name)) == total
        assert min(each("generation_tokens_total")) > 0, "both have worked"
        hits = each("prefix_cache_hit_tokens_total")
        assert seen["prefix_cache_hit_tokens_total"] == sum(hits)
        assert sum(each("completions_total", ",finish_reason=length")) == 16

        before = each("generation_tokens_total")
        await fleet.engines["engine-1"].generate([[5, 6]], {"max_new_tokens": 8, "ignore_eos": True})
        await seen.read()
        assert each("generation_tokens_total") == [before[0], before[1] + 8], "another one's request"
        assert seen["generation_tokens_total"] == 128

        running = asyncio.create_task(seen.client.post("/v1/completions", json={**LONG, "n": 2}))
        await until_running(fleet, 2)
        await seen.post("/pause?mode=keep&clear_cache=false")
        assert each("pauses_total") == [1, 1]
        assert sum(each("requests_running")) == seen["requests_running"] == 2
        await seen.post("/resume")
        assert (await running).status_code == 200
        await seen.post("/pause?mode=abort")
        await seen.post("/resume")
        assert seen["pauses_total"] == 2
        assert each("pauses_total") == [1, 1], "the fleet itself held the requests"
        await seen.post("/update_weights", weight_dir=str(other_model), weight_version="step-1")
        assert seen["weight_updates_total{outcome=committed}"] == 1
        assert each("weight_updates_total", ",outcome=committed") == [1, 1]
        assert min(each("weight_update_seconds_total")) > 0
        assert each("weight_info", ",version=step-1") == [1, 1]

        await fleet.remove("engine-0")
        gone = await seen.client.get("/metrics")
        assert 'engine="engine-0"' not in gone.text
        assert 'engine="engine-1"' in gone.text
        await fleet.engines["engine-1"].teardown()
        seen.now = {}
        await seen.read()
        assert seen["engine_state{engine=engine-1,state=closed}"] == 1
        assert seen["engine_requests_running{engine=engine-1}"] != seen["engine_requests_running{engine=engine-1}"]
