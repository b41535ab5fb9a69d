"""Clients that know nothing of drivetrain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import openai
import pytest
import pytest_asyncio

from drivetrain import InferenceEngine, SamplingParams
from drivetrain_serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: Final[Any] = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(loop_scope="session")
async def api(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


async def expected(engine: InferenceEngine) -> str:
    params = SamplingParams(temperature=0, max_new_tokens=8)
    text: str = (await engine.generate([MESSAGES], params)).completions[0].text
    return text


async def test_openais_client_chats(api: openai.AsyncOpenAI, engine: InferenceEngine) -> None:
    answer = await api.chat.completions.create(
        model="policy", messages=MESSAGES, temperature=0, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.content == await expected(engine)
    assert choice.logprobs is not None
    assert choice.logprobs.content
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(choice.logprobs.content)


async def test_openais_client_streams(api: openai.AsyncOpenAI, engine: InferenceEngine) -> None:
    text, tokens = "", None
    async with await api.chat.completions.create(
        model="policy", messages=MESSAGES, temperature=0, max_tokens=8, stream=True,
        stream_options={"include_usage": True},
    ) as chunks:  # fmt: skip
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            tokens = chunk.usage and chunk.usage.total_tokens
    assert text == await expected(engine)
    assert tokens, "the last chunk has the usage"


async def test_openais_client_completes(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(model="policy", prompt=[[5, 6], [7]], n=2, max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs is not None
    assert next(model.id for model in (await api.models.list()).data) == "policy"


async def test_openais_client_reads_the_errors(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"The model 'another' does not exist. Served: 'policy'"):
        await api.completions.create(model="another", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        await api.completions.create(model="policy", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
