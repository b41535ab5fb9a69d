"""Habits of trainers and their clients that may surprise a server, where no other test of the routes shows them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from drivetrain import InferenceEngine
from drivetrain_serving import Server
from drivetrain_serving.vllm.payloads import read_completion
from engines import HANGING
from trainer_groups import Trainer, free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7]
COMPLETION = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}


async def completion(client: httpx.AsyncClient, **body: object) -> Any:
    answer = await client.post("/v1/completions", json={**COMPLETION, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def finite(text: str) -> Any:
    """Read JSON that holds no NaN or infinity, neither as a word nor as a number too large."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert all(math.isfinite(number) for number in numbers(found))
    return found


def numbers(value: Any) -> list[float]:
    match value:
        case dict():
            return [number for one in value.values() for number in numbers(one)]
        case list():
            return [number for one in value for number in numbers(one)]
        case float():
            return [value]
        case _:
            return []


# Requests ------------------------------------------------------------------------------------------------------------


async def test_a_client_that_reads_every_logprob_as_a_number(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    for path, body in {
        "/v1/completions": {**COMPLETION, "logprobs": 5, "allowed_token_ids": [70, 71], "prompt_logprobs": 2},
        "/inference/v1/generate": {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 4, "logprobs": 5, "allowed_token_ids": [70, 71]},
        },
        "/generate": {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 4, "top_k": 2, "temperature": 1e-3},
            "return_logprob": True,
            "top_logprobs_num": 5,
            "logprob_start_len": 0,
        },
    }.items():
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert numbers(finite(answer.text))


@pytest.mark.parametrize(("logprobs", "top"), [(0, 1), (1, 1), (3, 3), (True, 1)])
async def test_a_client_that_asks_for_logprobs_by_number_or_by_true(
    client: httpx.AsyncClient, engine: InferenceEngine, logprobs: object, top: int
) -> None:
    (choice,) = await completion(client, logprobs=logprobs, return_tokens_as_token_ids=True)
    held = choice["logprobs"]
    assert len(held["tokens"]) == len(held["token_logprobs"]) == len(held["top_logprobs"]) == 4
    for token, logprob, alternatives in zip(held["tokens"], held["token_logprobs"], held["top_logprobs"], strict=True):
        assert token.startswith("token_id:")
        assert alternatives[token] == logprob
        assert len(alternatives) in (top, top + 1)


@pytest.mark.parametrize("logprobs", [None, False])
async def test_a_client_that_asks_for_no_logprobs(
    client: httpx.AsyncClient, engine: InferenceEngine, logprobs: object
) -> None:
    (choice,) = await completion(client, logprobs=logprobs)
    assert choice["logprobs"] is None


async def test_a_client_that_asks_for_the_logprobs_of_a_chat(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "ignore_eos": True}
    for top in (None, 0):
        answer = await client.post("/v1/chat/completions", json={**body, "top_logprobs": top})
        assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 2
    whole = await client.post("/v1/chat/completions", json={**body, "top_logprobs": -1})
    told = whole.json()["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in told] == [engine.model_info.vocab_size] * 2


async def test_a_client_that_gives_no_number_of_tokens(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    for asked in ({"max_tokens": None}, {}):
        body = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True, **asked}
        answer = await client.post("/v1/completions", json=body)
        assert len(answer.json()["choices"][0]["token_ids"]) == 16


async def test_a_client_that_sends_equal_prompts_with_one_seed(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    many = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}
    choices = await completion(client, **many, prompt=[PROMPT, PROMPT], n=2, seed=2**62 + 5)
    ids = [choice["token_ids"] for choice in choices]
    assert (ids[0], ids[1]) == (ids[2], ids[3]), "the prompts share the seed"
    assert ids[0] != ids[1]
    (second,) = await completion(client, **many, seed=2**62 + 6)
    assert second["token_ids"] == ids[1], "sample i has the seed plus i"


async def test_a_client_that_writes_null_for_what_it_does_not_set(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    absent = (
        *("stop", "stop_token_ids", "seed", "model", "n", "top_p", "top_k", "min_p", "logit_bias", "user"),
        *("repetition_penalty", "presence_penalty", "structured_outputs", "truncate_prompt_tokens", "stream"),
    )
    (plain,) = await completion(client)
    (given,) = await completion(client, **dict.fromkeys(absent))
    assert given["token_ids"] == plain["token_ids"]
    body: dict[str, object] = {"token_ids": PROMPT, "features": None, "model": None, "cache_salt": None}
    params = {"temperature": 0, "max_tokens": 4, "stop": None, "seed": None, "stop_token_ids": None}
    answer = await client.post("/inference/v1/generate", json={**body, "sampling_params": params})
    assert answer.json()["choices"][0]["token_ids"] == plain["token_ids"]
    sampling = {"temperature": 0, "max_new_tokens": 4, **dict.fromkeys(("stop", "stop_token_ids", "top_k", "top_p"))}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "image_data": None, "lora_path": None, "text": None}
    assert (await client.post("/generate", json=body)).json()["output_ids"] == plain["token_ids"]


async def test_a_client_that_sends_fields_of_its_own_server(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    fields = {
        "is_checkpoint_format": True,
        "use_beam_search": False,
        "required_prefix_token_ids": [1],
        "session_id": "s",
        "cache_salt": "7",
        "abort_all_requests": True,
        "pp_rank": 0,
    }
    headers = {"X-Session-ID": "s", "X-SMG-Routing-Key": "k", "X-Request-Id": "r", "X-data-parallel-rank": "0"}
    (plain,) = await completion(client)
    answer = await client.post("/v1/completions", json={**COMPLETION, **fields}, headers=headers)
    assert answer.json()["choices"][0]["token_ids"] == plain["token_ids"]
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}
    assert (await client.post("/v1/chat/completions", json=messages, headers=headers)).status_code == 200


async def test_a_client_that_sends_an_answer_back_as_it_came(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    question = {"role": "user", "content": "a"}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]}
    said: list[object] = []
    for content in ({"content": ""}, {"content": None, "refusal": None, "reasoning": None}, {}):
        messages = [question, {"role": "assistant", "tool_calls": calls, **content}, result]
        body = {"messages": messages, "max_tokens": 2, "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        count = await client.post("/tokenize", json={"messages": messages})
        assert count.status_code == 200, count.text
        said.append((answer.json()["choices"][0]["message"], count.json()["tokens"]))
    assert said[0] == said[1] == said[2]


async def test_a_client_whose_lower_priority_is_sooner() -> None:
    assert read_completion({**COMPLETION, "priority": 3}, stream=False).priority == -3


# Control -------------------------------------------------------------------------------------------------------------


async def test_a_client_that_reads_every_control_answer_as_json(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    for method, path in (
        ("POST", "/pause?mode=keep&clear_cache=false"),
        ("POST", "/resume"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/abort_requests"),
        ("POST", "/pause_generation"),
        ("POST", "/continue_generation"),
        ("POST", "/release_memory_occupation"),
        ("POST", "/resume_memory_occupation"),
        ("POST", "/destroy_weights_update_group"),
        ("POST", "/end_weight_update"),
        ("POST", "/update_weights"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/update_weights_from_distributed"),
        ("GET", "/get_world_size"),
        ("GET", "/is_paused"),
        ("GET", "/server_info"),
    ):
        body = {"tags": ["kv_cache"]} if "memory_occupation" in path else {}
        answer = await client.request(method, path, json=body)
        assert int(answer.headers["content-length"]) == len(answer.content), path
        assert answer.headers["content-type"] == "application/json", path
        assert isinstance(answer.json(), dict | None), path
        assert answer.status_code == 200 or answer.json().keys() & {"error", "success"}, path


async def test_a_client_that_puts_a_body_where_the_query_counts(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    for path in ("/get_world_size?include_dp=true", "/health", "/v1/models"):
        assert (await client.request("GET", path, json={})).status_code == 200
    paused = await client.post("/pause?mode=keep&clear_cache=False", json={"mode": "abort"})
    assert paused.json() == {"status": "paused"}
    slept = await client.post("/sleep?level=0&mode=keep", json={"tags": ["weights"]})
    assert slept.json() == {"status": "sleeping", "level": 0}
    woken = await client.post("/wake_up?tags=weights&tags=kv_cache")
    assert woken.json() == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert not engine.is_paused
    reset = await client.post("/reset_prefix_cache", json={"reset_running_requests": True})
    assert reset.json() == {"success": True}


async def test_a_client_that_probes_what_the_server_is(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    assert (await client.post("/init_broadcaster", json={})).status_code == 404
    assert (await client.get("/server_info")).status_code == 200
    adapter = {"lora_name": "absent", "lora_path": "/no/such/folder"}
    assert (await client.post("/v1/load_lora_adapter", json=adapter)).status_code == 404


async def test_a_client_that_polls_health_while_the_server_sleeps(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    await client.post("/pause?mode=abort")
    await client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
    try:
        assert (await client.get("/health")).status_code == 200
    finally:
        await client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
        await client.post("/resume")


@pytest.mark.slow
async def test_a_client_that_keeps_a_connection_for_longer_than_five_seconds(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for wait in (5.5, 0):
        writer.write(b"GET /is_paused HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(HANGING):
            assert await reader.readuntil(b"}") != b""
        await asyncio.sleep(wait)
    writer.close()


async def test_a_client_that_aborts_a_request_that_has_not_begun(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    await client.post("/pause_generation", json={"mode": "in_place"})
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "rid": "queued"}
    waiting = asyncio.create_task(client.post("/generate", json=body))
    async with asyncio.timeout(HANGING):
        while not waiting.done():
            await client.post("/abort_request", json={"rid": "queued"})
    answer = waiting.result().json()
    await client.post("/continue_generation", json={})
    assert answer["output_ids"] == []
    assert answer["meta_info"]["output_token_logprobs"] == []
    reason = answer["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert isinstance(reason["message"], str)


async def test_a_client_that_updates_an_adapter_without_target_modules(
    client: httpx.AsyncClient, engine: InferenceEngine, adapters: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step"
    shutil.copytree(adapters / "one", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["target_modules"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {"lora_name": "step", "lora_path": str(folder)}
    loaded = await client.post("/v1/load_lora_adapter", json=named)
    assert loaded.status_code == 200, loaded.text
    (given,) = await completion(client, model="step")
    (expected,) = await completion(client, model="one")
    assert given["token_ids"] == expected["token_ids"]
    for name in ("step", "one"):
        await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


# Groups --------------------------------------------------------------------------------------------------------------


async def test_a_trainer_that_leaves_before_its_group_has_formed(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def store(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(1024):
                pass
        left.set()
        writer.close()

    listening = await asyncio.start_server(store, "127.0.0.1", 0)
    group = {"master_address": "127.0.0.1", "master_port": listening.sockets[0].getsockname()[1]}
    group |= {"rank_offset": 1, "world_size": 2, "backend": "gloo", "group_name": "left"}
    joining = asyncio.create_task(client.post("/init_weights_update_group", json=group))
    async with listening, asyncio.timeout(HANGING):
        await came.wait()
        assert len((await completion(client))[0]["token_ids"]) == 4, "the server waits for the trainer, and serves"
        for path in ("/health", "/is_paused"):
            assert (await client.get(path)).status_code == 200
        assert not joining.done()
        assert not left.is_set()
        joining.cancel()
        await left.wait()


async def test_a_trainer_that_writes_its_ipv6_address_in_brackets(
    client: httpx.AsyncClient, engine: InferenceEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the trainer's gloo takes its host's name, which is no IPv6 address
    port, name = free_port(), "six"
    group = {"master_address": "[::1]", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": name}
    joining = trainer.do("join", address="[::1]", port=port, world_size=2, group=name, backend="gloo")
    async with asyncio.timeout(HANGING):
        error, answer = await asyncio.gather(
            joining, client.post("/init_weights_update_group", json={**group, "backend": "gloo"})
        )
    assert (error, answer.status_code) == ("", 200), answer.text
    await client.post("/destroy_weights_update_group", json={"group_name": name})
    await trainer.do("destroy", group=name)
