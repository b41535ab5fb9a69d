"""``/v1/embeddings`` over a real engine: ``make test-embeddings BACKEND=vllm``, ``sglang`` or ``transformers``.

Run in the environment that holds the engine. Vectors are compared with the last hidden states of transformers.
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel, AutoTokenizer

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from drivetrain_serving import Server, ServerConfig
from engines import HANGING

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKEND: Final = os.environ["BACKEND"]
TEXTS: Final = ["hello", "good morning"]
IDS: Final = [[5, 6, 7], [9, 8, 7, 6, 5], [70]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    torch.set_num_threads(1)
    config = ServerConfig(port=0, served_model_name=("policy",))
    async with create_engine(BACKEND, model=str(tiny_model("qwen2")), task="embed", context_length=64) as engine:
        async with Server(engine, config) as server:
            yield server.url


async def embed(url: str, given: Any, **fields: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await client.embeddings.create(model="policy", input=given, **{"encoding_format": "float", **fields})


def expected(prompts: list[list[int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what transformers computes: the last token's state after the final norm, of length 1."""
    model = AutoModel.from_pretrained(tiny_model("qwen2"), dtype=torch.float32).eval()
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()


async def test_ids_have_the_states_that_transformers_computes(url: str) -> None:
    answer = await embed(url, IDS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    np.testing.assert_allclose([one.embedding for one in answer.data], expected(IDS), rtol=0, atol=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, IDS))


async def test_texts_are_read_by_the_models_tokenizer(url: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen2"))
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    answer = await embed(url, TEXTS)
    np.testing.assert_allclose([one.embedding for one in answer.data], expected(prompts), rtol=0, atol=1e-4)
    (alone,) = (await embed(url, TEXTS[1])).data
    np.testing.assert_allclose(alone.embedding, answer.data[1].embedding, rtol=0, atol=1e-5)


async def test_base64_holds_the_same_numbers(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=HANGING) as client:
        body = {"model": "policy", "input": IDS[0], "encoding_format": "base64"}
        (found,) = (await client.post("/v1/embeddings", json=body)).json()["data"]
    vector = np.frombuffer(base64.b64decode(found["embedding"]), dtype="<f4")
    np.testing.assert_allclose(vector, expected(IDS[:1])[0], rtol=0, atol=1e-4)


async def test_vectors_can_be_shortened(url: str) -> None:
    first = expected(IDS[:1])[0, :3]
    (found,) = (await embed(url, IDS[0], dimensions=3)).data
    np.testing.assert_allclose(found.embedding, first / np.linalg.norm(first), rtol=0, atol=1e-4)


async def test_wrong_requests_are_refused_and_the_server_serves_on(url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        await embed(url, [[5] * 65])
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        await embed(url, IDS, dimensions=1_000_000)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="another", input="a")
        with pytest.raises(openai.APIStatusError, match="task"):
            await client.completions.create(model="policy", prompt="a", max_tokens=1)
    np.testing.assert_allclose((await embed(url, IDS[0])).data[0].embedding, expected(IDS[:1])[0], rtol=0, atol=1e-4)
