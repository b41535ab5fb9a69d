"""Experts and sampling masks in the trajectory of a session, asked for by a turn or by the server."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, SamplingMask, TokenPrompt, create_engine
from drivetrain.testing import tiny_model
from gateways import Gateway, gateway_of, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXPERTS = {"return_routed_experts": True, "return_prompt_routed_experts": True}
MASK = {"return_sampling_mask": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixture() -> AsyncIterator[InferenceEngine]:
    """An engine of a small mixture of experts."""
    async with create_engine("transformers", model=str(tiny_model("qwen3_moe"))) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(mixture: InferenceEngine) -> AsyncIterator[Gateway]:
    async with gateway_of(mixture) as gateway:
        yield gateway


def ids_in(packed: Any) -> Any:
    data = packed["data"] if isinstance(packed["data"], bytes) else base64.b64decode(packed["data"])
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"])


def mask_in(packed: Any) -> SamplingMask:
    data = packed["data"] if isinstance(packed["data"], bytes) else base64.b64decode(packed["data"])
    mask = SamplingMask(packed["vocab_size"], data)
    assert len(mask) == packed["positions"]
    return mask


async def experts_of(engine: InferenceEngine, token_ids: list[int]) -> Any:
    """Return the experts of all tokens, read in one pass."""
    asked = {"max_new_tokens": 1, "return_prompt_routed_experts": True}
    (completion,) = (await engine.generate([TokenPrompt(token_ids=tuple(token_ids))], asked)).completions
    assert completion.prompt_routed_experts is not None
    return completion.prompt_routed_experts.to_numpy()


async def test_a_branch_has_the_experts_of_all_tokens_but_the_last(mixture: InferenceEngine, gateway: Gateway) -> None:
    await gateway.talk(["hello", "go on", "and then?"], **EXPERTS)
    trajectory = await gateway.trajectory()
    (branch,) = trajectory["branches"]
    parts: list[Any] = []
    for number in branch["turns"]:
        turn = trajectory["turns"][number]
        of_prompt, of_output = ids_in(turn["prompt_routed_experts"]), ids_in(turn["routed_experts"])
        assert turn["prompt_routed_experts_start"] == sum(len(part) for part in parts), "each token is recorded once"
        assert len(of_prompt) == turn["prompt_tokens"] - turn["prompt_routed_experts_start"]
        assert len(of_output) == turn["completion_tokens"]
        parts += [of_prompt[:-1], of_output]  # the first sampled token's are those of the prompt's last
    found = np.concatenate(parts)
    assert len(found) == len(branch["token_ids"]) - 1
    assert (found == await experts_of(mixture, branch["token_ids"][:-1])).all()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["chat/completions", "messages", "responses"])
async def test_every_api_can_ask_for_both(gateway: Gateway, form: str, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "policy", "messages": [user("hello")], "input": "hello", "max_tokens": 6, "max_output_tokens": 6,
        "top_k": 3, "stream": stream, "seed": 5, "return_routed_experts": True, **MASK,
    }  # fmt: skip
    if form == "responses":
        del asked["max_tokens"]
    if form == "chat/completions":
        del asked["max_output_tokens"]
    one = gateway.session(f"{form.replace('/', '-')}-{stream}")
    response = await one.http.post(f"/sessions/{one.name}/v1/{form}", json=asked)
    assert response.status_code == 200, response.text
    assert "sampling_mask" not in response.text
    trajectory = await one.trajectory()
    (turn,), (branch,) = trajectory["turns"], trajectory["branches"]
    sampled = branch["token_ids"][turn["prompt_tokens"] :]
    mask = mask_in(turn["sampling_mask"])
    assert [mask.count(position) for position in range(len(mask))] == [3] * len(sampled)
    assert all(token_id in mask.ids(position) for position, token_id in enumerate(sampled))
    assert len(ids_in(turn["routed_experts"])) == len(sampled)
    assert (turn["prompt_routed_experts"], turn["prompt_routed_experts_start"]) == (None, None)


async def test_messagepack_has_bytes_also_from_disk(mixture: InferenceEngine, tmp_path: Path) -> None:
    async with gateway_of(mixture, memory_bytes=1, folder=str(tmp_path)) as gateway:
        await gateway.talk(["hello", "go on"], top_k=4, **EXPERTS, **MASK)
        assert any(name.endswith(".records") for _, _, names in os.walk(tmp_path) for name in names)
        response = await gateway.http.get("/sessions/a/trajectory", headers={"accept": "application/msgpack"})
        packed, as_json = msgspec.msgpack.decode(response.content), await gateway.trajectory()
        for turn, other in zip(packed["turns"], as_json["turns"], strict=True):
            assert isinstance(turn["sampling_mask"]["data"], bytes)
            assert mask_in(turn["sampling_mask"]) == mask_in(other["sampling_mask"])
            for name in ("routed_experts", "prompt_routed_experts"):
                assert isinstance(turn[name]["data"], bytes)
                assert (ids_in(turn[name]) == ids_in(other[name])).all()


async def test_a_turn_overrides_the_server(mixture: InferenceEngine) -> None:
    async with gateway_of(mixture, routed_experts=True, sampling_mask=True) as gateway:
        await gateway.ask([user("hello")])
        await gateway.ask([user("hello")], return_routed_experts=False, return_sampling_mask=False)
        await gateway.ask([user("hello")], return_routed_experts=None, return_sampling_mask=None)
        turns = (await gateway.trajectory())["turns"]
    recorded = [(turn["routed_experts"] is not None, turn["sampling_mask"] is not None) for turn in turns]
    assert recorded == [(True, True), (False, False), (True, True)]


@pytest.mark.parametrize("name", [*EXPERTS, *MASK])
async def test_only_booleans_are_taken(gateway: Gateway, name: str) -> None:
    for form in ("chat/completions", "messages", "responses"):
        asked = {"messages": [user("hello")], "input": "hello", name: 1}
        response = await gateway.http.post(f"/sessions/wrong/v1/{form}", json=asked)
        assert response.status_code == 400
        assert f"{name}=1: expected true, false or null" in response.text


@pytest.mark.parametrize("name", EXPERTS)
async def test_an_engine_without_experts_refuses(name: str) -> None:
    async with (
        create_engine("transformers", model=str(tiny_model())) as engine,
        gateway_of(engine) as gateway,
    ):
        for form in ("chat/completions", "messages", "responses"):
            asked = {"messages": [user("hello")], "input": "hello", name: True}
            response = await gateway.http.post(f"/sessions/a/v1/{form}", json=asked)
            assert response.status_code == 501
            assert name.removeprefix("return_") in response.text
            assert (await gateway.http.get("/sessions/a/trajectory")).json().get("turns", []) == []
