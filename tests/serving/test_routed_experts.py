"""``return_routed_experts`` of SGLang's ``/generate``: the experts of a mixture's tokens, as slime replays them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, TokenPrompt, create_engine
from drivetrain.backend.toolkit import expert_layers
from drivetrain.backend.toolkit.expert_layers import layers_with_experts
from drivetrain.testing import tiny_model
from drivetrain.types.outputs import Completion
from drivetrain_serving import Server, ServerConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "max_new_tokens": 6}
Served = tuple[InferenceEngine, httpx.AsyncClient, int]


@pytest_asyncio.fixture(params=["qwen3_moe", "deepseek_v3"], scope="module", loop_scope="module")
async def mixture(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A served mixture of experts, its client and its number of layers; DeepSeek's first layer has no experts."""
    folder = tiny_model(request.param)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    async with (
        create_engine("transformers", model=str(folder)) as engine,
        Server(engine, ServerConfig(port=0, dialect="sglang")) as server,
        httpx.AsyncClient(base_url=server.url, timeout=240) as client,
    ):
        yield engine, client, layers


async def generated(client: httpx.AsyncClient, **body: object) -> Any:
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_routed_experts": True, **body}
    response = await client.post("/generate", json=asked)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(event) for event in events[:-1]]


def decoded(meta: dict[str, Any], layers: int) -> Any:
    """Read the experts as slime does: all of them, with two per token and layer."""
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    return flat.reshape(-1, layers, 2)


async def direct(engine: InferenceEngine) -> Completion:
    asked = {**GREEDY, "return_routed_experts": True, "return_prompt_routed_experts": True}
    return (await engine.generate([TokenPrompt(token_ids=tuple(PROMPT))], asked)).completions[0]


async def test_the_models_file_is_read_once(mixture: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client, _ = mixture
    await generated(client)
    monkeypatch.setattr(expert_layers, "model_file", None)  # a further read would fail
    await generated(client, sampling_params={**GREEDY, "n": 2})


async def test_all_tokens_but_the_last_have_experts(mixture: Served) -> None:
    engine, client, layers = mixture
    body = await generated(client)
    found = decoded(body["meta_info"], layers)
    assert len(found) == len(PROMPT) + len(body["output_ids"]) - 1
    completion = await direct(engine)
    assert completion.prompt_routed_experts is not None
    assert completion.routed_experts is not None
    expected = (completion.prompt_routed_experts[:-1] + completion.routed_experts).to_numpy()
    dense = layers - expected.shape[1]
    assert (found[:, dense:] == expected).all()
    assert not found[:, :dense].any(), "a layer without experts has zeros"


async def test_the_start_leaves_out_tokens_of_the_prompt(mixture: Served) -> None:
    _, client, layers = mixture
    whole = decoded((await generated(client))["meta_info"], layers)
    for start in range(len(PROMPT) + 1):
        part = decoded((await generated(client, routed_experts_start_len=start))["meta_info"], layers)
        assert (part == whole[start:]).all()
        assert len(part) == len(whole) - start
    for start in (-1, len(PROMPT) + 1):
        asked = {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": start}
        response = await client.post("/generate", json=asked)
        assert response.status_code == 400
        assert "routed_experts_start_len" in response.text


async def test_the_last_event_of_a_stream_has_them(mixture: Served) -> None:
    _, client, layers = mixture
    *growing, last = await generated(client, stream=True)
    assert growing
    assert not any("routed_experts" in event["meta_info"] for event in growing)
    whole = await generated(client)
    assert last["meta_info"]["routed_experts"] == whole["meta_info"]["routed_experts"]
    assert len(decoded(last["meta_info"], layers)) == len(PROMPT) + 5


async def test_each_prompt_of_a_batch_has_its_own(mixture: Served) -> None:
    _, client, layers = mixture
    batch = await generated(client, input_ids=[PROMPT, PROMPT[:2]])
    assert [len(decoded(one["meta_info"], layers)) for one in batch] == [len(PROMPT) + 5, 2 + 5]
    plain = await generated(client, return_routed_experts=False)
    assert "routed_experts" not in plain["meta_info"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, [1, 2, 3]),
        ({"moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ({"moe_layer_freq": [0, 1]}, [1]),
        ({"moe_layer_freq": 0, "decoder_sparse_step": 0}, [0, 1, 2, 3]),
        ({"mlp_only_layers": [2], "decoder_sparse_step": 1}, [0, 1, 3]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, [1, 2]),
    ],
)
async def test_layers_are_found_in_the_configuration(fields: dict[str, object], expected: list[int]) -> None:
    assert list(layers_with_experts(fields, 4)) == expected
