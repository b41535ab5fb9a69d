"""OpenAI's own package against ``drivetrain serve``: ``make test-trainers``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from pydantic import BaseModel

from tool_conversation import ANSWER, CALL, QUESTION, TOOLS, Score, require_own_logprobs, text_of

MESSAGES: Final[Any] = [{"role": "user", "content": QUESTION}]
IDS: Final[Any] = {"return_token_ids": True}


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions_of_ids(api: openai.OpenAI, score: Score) -> None:
    prompts = [[104, 105], [111]]
    answer = api.completions.create(model="policy", prompt=prompts, n=2, max_tokens=8, logprobs=0, extra_body=IDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    generated = 0
    for choice in answer.choices:
        found: Any = choice
        generated += len(found.token_ids)
        assert found.prompt_token_ids == prompts[choice.index // 2]
        assert choice.logprobs is not None
        logprobs: Any = choice.logprobs.token_logprobs
        require_own_logprobs(score, found.prompt_token_ids, found.token_ids, logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == generated


def test_a_stream_of_completions_is_the_whole_answer(api: openai.OpenAI) -> None:
    asked: Any = {"model": "policy", "prompt": QUESTION, "max_tokens": 16, "temperature": 0}
    whole = api.completions.create(**asked)
    chunks: Any = api.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].text
    assert usage == whole.usage


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_calls_a_tool_and_reads_its_result(api: openai.OpenAI, score: Score, temperature: float) -> None:
    messages = list(MESSAGES)
    texts = []
    for _ in range(2):
        answer: Any = api.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=temperature, seed=1, logprobs=True,
            max_completion_tokens=200, extra_body=IDS,
        )  # fmt: skip
        (choice,) = answer.choices
        logprobs = [token.logprob for token in choice.logprobs.content]
        require_own_logprobs(score, answer.prompt_token_ids, choice.token_ids, logprobs)
        texts += [text_of(choice.token_ids), choice.message.content]
        messages.append(choice.message)
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    assert texts == [f"{CALL}\n", None, f"{ANSWER}\n", ANSWER]


class add(BaseModel):
    a: int
    b: int


def test_the_stream_helper_puts_a_tool_call_together(api: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(add)
    with api.chat.completions.stream(
        model="policy", messages=MESSAGES, tools=[tool], temperature=0, max_tokens=200, logprobs=True
    ) as stream:
        kinds = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].function.parsed_arguments == add(a=1, b=2)
    assert "tool_calls.function.arguments.done" in kinds


def test_responses_of_a_session(url: str, score: Score) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    with openai.OpenAI(base_url=f"{url}/sessions/responses/v1", api_key="none", max_retries=0) as api:
        given: list[Any] = [{"role": "user", "content": QUESTION}]
        first = api.responses.create(model="policy", input=given, tools=[tool], temperature=0, store=False)
        (call,) = first.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"a": 1, "b": 2}
        given += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        with api.responses.stream(model="policy", input=given, tools=[tool], temperature=0, store=False) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            last = stream.get_final_response()
    assert text == last.output_text == ANSWER


def test_errors_are_of_their_kind(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.chat.completions.create(model="another", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        api.chat.completions.create(model="policy", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="context length"):
        api.completions.create(model="policy", prompt=[5] * 2000)
