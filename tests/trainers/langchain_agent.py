# pyright: reportMissingImports=false
"""LangChain's package for OpenAI against ``drivetrain serve``: ``make test-trainers``."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tool_conversation import ANSWER, CALL, QUESTION, Score, require_own_logprobs, text_of


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD: Any = tool(add)


def chat(address: str, **more: Any) -> Any:
    return ChatOpenAI(base_url=address, api_key="none", model="policy", temperature=0, max_retries=0, **more)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_a_tool_and_is_recorded(url: str, score: Score, stream: bool, responses: bool) -> None:
    session = f"langchain-{stream}-{responses}"
    model = chat(f"{url}/sessions/{session}/v1", use_responses_api=responses).bind_tools([ADD])
    messages: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(2):
        if stream:
            first, *others = model.stream(messages)
            answer: Any = sum(others, first)
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            result = ADD.invoke(call)
            assert isinstance(result, ToolMessage)
            messages.append(result)
    assert [call["args"] for call in messages[1].tool_calls] == [{"a": 1, "b": 2}]
    assert messages[-1].text == ANSWER
    trajectory = httpx.get(f"{url}/sessions/{session}/trajectory", timeout=60).json()
    (branch,) = trajectory["branches"]
    ids, mask = branch["token_ids"], branch["loss_mask"]
    assert text_of([token_id for token_id, one in zip(ids, mask, strict=True) if one]) == f"{CALL}\n{ANSWER}\n"
    expected = score(ids)
    wanted = [expected[at - 1] for at, sampled in enumerate(mask) if sampled]
    assert [one for one in branch["logprobs"] if one is not None] == pytest.approx(wanted, abs=1e-3)


def test_logprobs_of_a_chat(url: str, score: Score) -> None:
    model = chat(f"{url}/v1", logprobs=True, max_tokens=8, extra_body={"return_tokens_as_token_ids": True})
    answer = model.invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    asked = [{"role": "user", "content": QUESTION}]
    prompt = httpx.post(f"{url}/tokenize", json={"messages": asked}, timeout=60).json()["tokens"]
    output = [int(token["token"].removeprefix("token_id:")) for token in content]
    require_own_logprobs(score, prompt, output, [token["logprob"] for token in content])


def test_completions_stream(url: str) -> None:
    model = OpenAI(base_url=f"{url}/v1", api_key="none", model="policy", temperature=0, max_tokens=16, max_retries=0)
    assert "".join(model.stream(QUESTION)) == model.invoke(QUESTION)
