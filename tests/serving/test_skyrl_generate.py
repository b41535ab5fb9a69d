"""SkyRL's ``/skyrl/v1/generate``: experts and the ids that top-k left, beside the tokens."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, TokenPrompt, create_engine
from drivetrain.testing import tiny_model
from trainer_groups import a_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8]
PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
DRAWN: dict[str, Any] = {**PARAMS, "temperature": 1.0, "seed": 3, "top_k": 4, "top_p": 0.9}


@pytest_asyncio.fixture(params=["qwen3_moe", "deepseek_v3"], scope="module", loop_scope="session")
async def mixture(request: pytest.FixtureRequest) -> AsyncIterator[tuple[InferenceEngine, httpx.AsyncClient]]:
    """A served mixture of experts, and its client; DeepSeek's first layer has no experts."""
    async with (
        create_engine("transformers", model=str(tiny_model(request.param))) as engine,
        a_client(engine) as client,
    ):
        yield engine, client


async def choice_of(client: httpx.AsyncClient, **body: object) -> Any:
    asked = {"model": "policy", "token_ids": PROMPT, "sampling_params": PARAMS, **body}
    answer = await client.post("/skyrl/v1/generate", json=asked)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def unpacked(array: dict[str, Any]) -> Any:
    assert list(array) == ["data", "shape", "dtype"], "SkyRL's client splices the data where it comes first"
    return np.frombuffer(base64.b64decode(array["data"]), dtype=array["dtype"]).reshape(array["shape"])


@pytest.mark.parametrize("start", [0, 3, 4])
async def test_experts_from_a_token_of_the_prompt_on(
    mixture: tuple[InferenceEngine, httpx.AsyncClient], start: int
) -> None:
    engine, client = mixture
    choice = await choice_of(client, sampling_params={**PARAMS, "routed_experts_prompt_start": start})
    found = unpacked(choice["routed_experts"])
    assert found.dtype == np.uint8
    assert len(found) == len(PROMPT) - start + len(choice["token_ids"]) - 1
    params = {
        **{"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        **{"return_routed_experts": True, "return_prompt_routed_experts": True},
    }
    (own,) = (await engine.generate([TokenPrompt(token_ids=tuple(PROMPT))], params)).completions
    assert own.token_ids == choice["token_ids"]
    assert own.prompt_routed_experts is not None
    assert own.routed_experts is not None
    experts = (own.prompt_routed_experts[:-1] + own.routed_experts).to_numpy()[start:]
    dense = found.shape[1] - experts.shape[1]
    assert (found[:, dense:] == experts).all()
    assert choice["rollout_sample_support"] is None


async def test_the_ids_that_were_left(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    choice = await choice_of(client, sampling_params=DRAWN, return_sample_support=True)
    rows = unpacked(choice["rollout_sample_support"])
    assert rows.dtype == np.int32
    assert rows.shape == (6, 4)
    params = {**DRAWN, "return_sampling_mask": True, "max_new_tokens": DRAWN["max_tokens"]}
    del params["max_tokens"]
    (own,) = (await engine.generate([TokenPrompt(token_ids=tuple(PROMPT))], params)).completions
    assert own.token_ids == choice["token_ids"]
    assert own.sampling_mask is not None
    for position, (row, token_id) in enumerate(zip(rows, own.token_ids, strict=True)):
        left = row[row >= 0].tolist()
        assert left == own.sampling_mask.ids(position)
        assert token_id in left
        assert set(row[len(left) :].tolist()) <= {-1}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(own.logprobs)
    assert choice["routed_experts"] is None, "a dense model has no experts"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"return_sample_support": True}, "top_k=None"),
        ({"return_sample_support": True, "sampling_params": {**PARAMS, "top_k": 1}}, "top_k=1"),
        ({"return_sample_support": True, "sampling_params": {**PARAMS, "top_k": 2**31 - 1}}, "vocabulary's size"),
        ({"return_sample_support": 1}, "return_sample_support=1"),
        ({"sampling_params": {**PARAMS, "routed_experts_prompt_start": 5}}, "up to the prompt's length, 4"),
        ({"stream": True}, "stream=true"),
        ({"features": {"a": 1}}, "features"),
        ({"token_ids": []}, "token_ids"),
    ],
)
async def test_what_cannot_be_is_refused(client: httpx.AsyncClient, body: dict[str, object], text: str) -> None:
    asked = {"token_ids": PROMPT, "sampling_params": PARAMS, **body}
    answer = await client.post("/skyrl/v1/generate", json=asked)
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]
