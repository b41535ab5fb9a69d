"""The route ``/v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel

from documented_answers import Document
from drivetrain import EngineConfig, InferenceEngine
from drivetrain.backend.toolkit.translation import shortened_all
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation, Task
from drivetrain.types.prompts import TextPrompt
from drivetrain_serving import Server, ServerConfig
from drivetrain_transformers.engine import TransformersBackend
from engines import HANGING

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["hello", "good morning"]


class EmbeddingBackend(TransformersBackend):
    """Embeds with the model of the transformers backend, which does not claim embeddings itself."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"task": Task.GENERATE}))
        self.embedder = AutoModel.from_pretrained(config.model, dtype=torch.float32)

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        def vector(prompt: list[int]) -> list[float]:
            with torch.no_grad():
                state = self.embedder(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
            numbers: list[float] = torch.nn.functional.normalize(state, dim=0).tolist()
            return numbers

        vectors = await asyncio.to_thread(lambda: [vector(prompt) for prompt in prompts])
        return shortened_all(vectors, dimensions)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedding(model: Path) -> AsyncIterator[InferenceEngine]:
    config = EngineConfig(backend="transformers", model=str(model), task=Task.EMBED)
    claimed = frozenset({Capability.EMBED})
    backend = EmbeddingBackend(config)
    async with InferenceEngine(
        config, backend, capabilities=claimed, isolation=Isolation.INLINE, versions={}
    ) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def embedder(embedding: InferenceEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with Server(embedding, ServerConfig(port=0, served_model_name=("policy",))) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            yield client


async def vectors(client: httpx.AsyncClient, **body: object) -> list[list[float]]:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


async def test_answers_are_as_the_openapi_document_says(embedder: httpx.AsyncClient) -> None:
    document = Document((await embedder.get("/openapi.json")).json())
    for body in ({"input": TEXTS}, {"input": TEXTS, "encoding_format": "base64"}, {"input": 7}):
        assert document.errors(await embedder.post("/v1/embeddings", json=body)) == []
    assert document.seen == {("POST", "/v1/embeddings", 200), ("POST", "/v1/embeddings", 400)}


async def test_each_form_of_input_has_the_engines_vectors(
    embedder: httpx.AsyncClient, embedding: InferenceEngine
) -> None:
    ids = [embedding.tokenizer.encode(TextPrompt(text=text)) for text in TEXTS]
    expected = [pytest.approx(vector, abs=1e-6) for vector in await embedding.encode(TEXTS)]
    assert expected[0] != expected[1]
    for given in (TEXTS, ids):
        assert await vectors(embedder, input=given) == expected
        assert await vectors(embedder, input=given[0]) == expected[:1]
    answer = (await embedder.post("/v1/embeddings", json={"input": TEXTS, "model": "policy"})).json()
    assert (answer["object"], answer["model"]) == ("list", "policy")
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert answer["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}


async def test_a_header_gives_an_answer_its_id(embedder: httpx.AsyncClient) -> None:
    body = {"input": "hello", "request_id": "of-the-body"}
    for headers, expected in (({"X-Request-Id": "r"}, "embd-r"), ({}, "embd-of-the-body")):
        assert (await embedder.post("/v1/embeddings", json=body, headers=headers)).json()["id"] == expected


async def test_base64_is_that_of_float32(embedder: httpx.AsyncClient) -> None:
    defaults = {"use_activation": True, "padding": "do_not_pad", "embed_dtype": "float32", "endianness": "little"}
    numbers = await vectors(
        embedder, input="hello", encoding_format="float", user="someone", dimensions=None, **defaults
    )
    response = await embedder.post("/v1/embeddings", json={"input": "hello", "encoding_format": "base64"})
    data = base64.b64decode(response.json()["data"][0]["embedding"], validate=True)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(numbers[0], abs=1e-6)


async def test_openais_client_embeds(embedder: httpx.AsyncClient, embedding: InferenceEngine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{embedder.base_url}/v1", api_key="none", max_retries=0) as api:
        answer = await api.embeddings.create(model="policy", input=TEXTS, dimensions=8)
    expected = await embedding.encode(TEXTS, dimensions=8)
    assert [one.embedding for one in answer.data] == [pytest.approx(vector, abs=1e-6) for vector in expected]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [[5, -1]]}, "input"),
        ({"input": [5, 10**9]}, "input"),
        ({"input": [5] * 100_000}, "input"),
        ({"input": "hello " * 100_000}, "input"),
        ({"input": {"text": "hello"}}, "input"),
        ({"input": "hello", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "hello", "dimensions": 0}, "dimensions"),
        ({"input": "hello", "dimensions": 1 << 20}, "dimensions"),
        ({"input": "hello", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"input": "hello", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages"),
        ({"input": "hello", "use_activation": False}, "use_activation"),
        ({"input": "hello", "normalize": False}, "normalize"),
        ({"input": "hello", "padding": "max_length"}, "padding"),
        ({"input": "hello", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "hello", "encoding_format": "base64", "endianness": "big"}, "endianness"),
    ],
)
async def test_a_wrong_request_is_refused_by_its_field(
    embedder: httpx.AsyncClient, body: dict[str, object], field: str
) -> None:
    response = await embedder.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"], response.json()["error"]["type"]) == (field, "BadRequestError")


@pytest.mark.parametrize("field", ["chat_template", "messages", "mm_processor_kwargs", "truncate_prompt_tokens"])
async def test_empty_values_of_fields_that_are_not_honoured_are_taken(embedder: httpx.AsyncClient, field: str) -> None:
    values: tuple[object, ...] = (None, False, "", [], {})
    for empty in values:
        assert await vectors(embedder, input="hello", **{field: empty})


async def test_another_model_is_not_found(embedder: httpx.AsyncClient) -> None:
    response = await embedder.post("/v1/embeddings", json={"input": "hello", "model": "other"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_an_engine_that_generates_refuses_in_the_servers_dialect(engine: InferenceEngine) -> None:
    for dialect in ("vllm", "sglang"):
        config = ServerConfig.model_validate({"port": 0, "dialect": dialect})
        async with Server(engine, config) as server, httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post("/v1/embeddings", json={"input": "hello"})
            answer = response.json()
            assert response.status_code == 501
            assert answer["drivetrain"] == {"error": "UnsupportedCapability", "capability": "embed"}
            message = answer["message"] if dialect == "sglang" else answer["error"]["message"]
            assert "embed" in message
