"""A gateway under test, as an agent and as a trainer see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class Gateway:
    """A server, and one session of it as agent and trainer see it."""

    def __init__(self, server: Server, http: httpx.AsyncClient, name: str = "a") -> None:
        self.server, self.http, self.name = server, http, name
        self.api = openai.AsyncOpenAI(base_url=f"{server.url}/sessions/{name}/v1", api_key="none", max_retries=0)

    def session(self, name: str) -> Gateway:
        return Gateway(self.server, self.http, name)

    async def ask(self, messages: Sequence[Any], **fields: Any) -> Any:
        """Ask as an agent does; the ids are returned for the test only."""
        known = {name: fields.pop(name) for name in ("tools", "logprobs", "n", "temperature", "seed") if name in fields}
        extra = {"return_token_ids": True, "max_tokens": 12, **fields}
        return await self.api.chat.completions.create(
            model="policy", messages=list(messages), **{"temperature": 1.0, **known}, extra_body=extra
        )  # fmt: skip

    async def talk(self, texts: Sequence[str], **fields: Any) -> tuple[list[Message], list[Any]]:
        """Hold a conversation; return its messages and the answers."""
        messages: list[Message] = []
        answers = []
        for text in texts:
            messages.append(user(text))
            answers.append(await self.ask(messages, **fields))
            messages.append(answers[-1].choices[0].message.model_dump(exclude_none=True))
        return messages, answers

    async def trajectory(self) -> Any:
        response = await self.http.get(f"/sessions/{self.name}/trajectory")
        assert response.status_code == 200, response.text
        return response.json()

    async def branches(self) -> list[Any]:
        found: list[Any] = (await self.trajectory())["branches"]
        return found


@asynccontextmanager
async def gateway_of(engine: InferenceEngine, **sessions: object) -> AsyncIterator[Gateway]:
    config = {"port": 0, "served_model_name": ("policy",), "sessions": sessions}
    async with Server(engine, ServerConfig.model_validate(config)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as http:
            yield Gateway(server, http)


def ids_of(answer: Any, index: int = 0) -> list[int]:
    ids: list[int] = answer.prompt_token_ids + answer.choices[index].token_ids
    return ids


def sampled(branch: Mapping[str, Any]) -> list[list[int]]:
    """Return the runs of sampled ids."""
    runs: list[list[int]] = [[]]
    for token_id, one in zip(branch["token_ids"], branch["loss_mask"], strict=True):
        if one:
            runs[-1].append(token_id)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


async def require_own_logprobs(engine: InferenceEngine, branch: Mapping[str, Any]) -> None:
    """Compare a branch's logprobs with those that the engine computes for its ids."""
    (scored,) = (await engine.compute_logprobs([branch["token_ids"]])).completions
    assert scored.prompt_logprobs is not None
    recorded = [value for value in branch["logprobs"] if value is not None]
    expected = [value for value, one in zip(scored.prompt_logprobs, branch["loss_mask"], strict=True) if one]
    assert recorded == pytest.approx(expected, abs=1e-3)
