"""The token-capture gateway over a real engine: ``make test-gateway BACKEND=transformers``, ``vllm`` or ``sglang``.

Run in the environment that holds the engine. One engine serves all tests. Its model was taught to call a tool, and its
logprobs are compared with those of transformers alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain import InferenceEngine, TextPrompt, create_engine
from engines import require_ready_and_idle, until, until_idle, until_running
from gateways import Gateway, gateway_of, ids_of, sampled, user
from taught_model import teach
from tool_conversation import ANSWER, CALL, QUESTION, TOOLS, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKEND: Final = os.environ["BACKEND"]
QUESTIONS: Final = ("hello", "and then?", "go on", "really?")
OF_ANTHROPIC: Final = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
OF_RESPONSES: Final = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]


@dataclass(frozen=True)
class Talk:
    """An engine, its gateway, the folder of its model, and that model in transformers."""

    engine: InferenceEngine
    gateway: Gateway
    folder: Path
    reference: PreTrainedModel

    def require_own_logprobs(self, branch: Any) -> None:
        """Compare a branch's logprobs with those that transformers alone computes."""
        ids = torch.tensor([branch["token_ids"]])
        with torch.no_grad():
            logprobs = self.reference(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        expected = [None, *logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()]
        assert len(branch["logprobs"]) == len(branch["loss_mask"]) == len(expected)
        assert [value is not None for value in branch["logprobs"]] == [one == 1 for one in branch["loss_mask"]]
        recorded = [value for value in branch["logprobs"] if value is not None]
        own = [value for value, one in zip(expected, branch["loss_mask"], strict=True) if one]
        assert recorded == pytest.approx(own, abs=2e-3)

    async def post(self, face: str, **body: Any) -> Any:
        """Send a request to a route of the session; return the answer."""
        response = await self.gateway.http.post(f"/sessions/a/v1/{face}", json={"model": "policy", **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, face: str, **body: Any) -> list[Any]:
        """Send a request to a route that streams named events; return them."""
        fields = {"model": "policy", "stream": True, **body}
        response = await self.gateway.http.post(f"/sessions/a/v1/{face}", json=fields)
        assert response.status_code == 200, response.text
        pairs = [event.split("\n") for event in response.text.removesuffix("\n\n").split("\n\n")]
        found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
        assert [name for name, _ in pairs] == [f"event: {one['type']}" for one in found]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talk]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("taught")
    teach(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sizes: dict[str, Any] = {"max_num_seqs": 16, "context_length": 1024}
    async with create_engine(BACKEND, model=str(folder), **sizes) as engine, gateway_of(engine) as gateway:
        yield Talk(engine, gateway, folder, reference)


@pytest_asyncio.fixture(loop_scope="module")
async def talk(served: Talk) -> AsyncIterator[Talk]:
    """The gateway without sessions; a test must leave the engine ready and idle."""
    yield served
    await require_ready_and_idle(served.engine)
    for session in (await served.gateway.http.get("/sessions")).json()["sessions"]:
        assert (await served.gateway.http.delete(f"/sessions/{session['session_id']}")).status_code == 204


# Turns ---------------------------------------------------------------------------------------------------------------


async def test_each_prompt_extends_the_ids_before_it(talk: Talk) -> None:
    _, answers = await talk.gateway.talk(QUESTIONS, seed=3)
    for before, after in itertools.pairwise(answers):
        assert after.prompt_token_ids[: len(ids_of(before))] == ids_of(before)
    (branch,) = await talk.gateway.branches()
    assert branch["token_ids"] == ids_of(answers[-1])
    assert sampled(branch) == [answer.choices[0].token_ids for answer in answers]
    assert branch["turns"] == [0, 1, 2, 3]
    talk.require_own_logprobs(branch)


async def test_ids_stay_as_sampled_where_their_text_has_others(talk: Talk) -> None:
    _, answers = await talk.gateway.talk(QUESTIONS, seed=5, ignore_eos=True, temperature=2, max_tokens=40)
    runs = [answer.choices[0].token_ids for answer in answers]
    tokenizer = talk.engine.tokenizer
    again = [tokenizer.encode(TextPrompt(text=talk.engine.decode(ids), add_special_tokens=False)) for ids in runs]
    assert again != runs, "no text has other ids; take another seed"
    (branch,) = await talk.gateway.branches()
    assert sampled(branch) == runs


# Branches ------------------------------------------------------------------------------------------------------------


async def test_an_edited_history_is_a_branch_of_its_own(talk: Talk) -> None:
    messages, answers = await talk.gateway.talk(QUESTIONS[:2], seed=2)
    other = await talk.gateway.ask([*messages[:2], user("something else")], seed=2)
    assert other.prompt_token_ids[: len(ids_of(answers[0]))] == ids_of(answers[0])
    edited = [messages[0], {"role": "assistant", "content": "I never said so"}, user("and then?")]
    new = await talk.gateway.ask(edited, seed=2)
    branches = await talk.gateway.branches()
    assert [branch["turns"] for branch in branches] == [[0, 1], [0, 2], [3]]
    assert [branch["shared_length"] for branch in branches] == [0, len(ids_of(answers[0])), 0]
    assert sampled(branches[2]) == [new.choices[0].token_ids], "an answer that was not sampled has no loss"
    for branch in branches:
        talk.require_own_logprobs(branch)


async def test_a_subagent_and_parallel_calls_are_told_apart(talk: Talk) -> None:
    messages, answers = await talk.gateway.talk(["hello"], seed=2)
    follow_ups = [[*messages, user(text)] for text in ("one", "two", "three")]
    helper = [{"role": "system", "content": "You are a helper."}, user("hello")]
    asked = await asyncio.gather(*(talk.gateway.ask(each) for each in (*follow_ups, helper)))
    branches = await talk.gateway.branches()
    assert {tuple(branch["token_ids"]) for branch in branches} == {tuple(ids_of(one)) for one in asked}
    assert all(one.prompt_token_ids[: len(ids_of(answers[0]))] == ids_of(answers[0]) for one in asked[:3])
    assert sorted(len(branch["turns"]) for branch in branches) == [1, 2, 2, 2]
    for branch in branches:
        talk.require_own_logprobs(branch)


async def test_each_of_several_choices_can_be_continued(talk: Talk) -> None:
    answer = await talk.gateway.ask([user("hello")], n=2, seed=4, temperature=2, max_tokens=30)
    assert answer.choices[0].token_ids != answer.choices[1].token_ids
    for choice in answer.choices:
        said = choice.message.model_dump(exclude_none=True)
        more = await talk.gateway.ask([user("hello"), said, user("go on")])
        assert more.prompt_token_ids[: len(ids_of(answer, choice.index))] == ids_of(answer, choice.index)
    assert [branch["turns"] for branch in await talk.gateway.branches()] == [[0, 2], [1, 3]]


# Streams and clients that go -----------------------------------------------------------------------------------------


async def test_a_stream_is_recorded_as_a_whole_answer_is(talk: Talk) -> None:
    asked: Any = {"model": "policy", "messages": [user("hello")], "max_tokens": 30, "seed": 3}
    content = ""
    async with await talk.gateway.api.chat.completions.create(**asked, stream=True) as chunks:
        async for chunk in chunks:
            content += "".join(choice.delta.content or "" for choice in chunk.choices)
    (branch,) = await talk.gateway.branches()
    more = await talk.gateway.ask([user("hello"), {"role": "assistant", "content": content}, user("go on")])
    assert more.prompt_token_ids[: len(branch["token_ids"])] == branch["token_ids"]
    assert len(await talk.gateway.branches()) == 1
    whole = await talk.gateway.session("b").ask([user("hello")], seed=3, max_tokens=30)
    assert ids_of(whole) == branch["token_ids"]


async def test_a_client_that_goes_leaves_a_partial_turn(talk: Talk) -> None:
    body = {"messages": [user("hello")], "max_tokens": 900, "ignore_eos": True, "stream": True}
    http = talk.gateway.http
    async with http.stream("POST", "/sessions/a/v1/chat/completions", json=body) as response:
        await anext(response.aiter_lines())
    await until_idle(talk.engine)

    async def recorded() -> bool:
        return bool((await talk.gateway.trajectory())["turns"])

    await until(recorded)
    (branch,) = await talk.gateway.branches()
    assert branch["finish_reason"] == "disconnect"
    assert 0 < sum(branch["loss_mask"]) < 900
    talk.require_own_logprobs(branch)


# Weights -------------------------------------------------------------------------------------------------------------


async def test_an_update_between_turns_shows_in_the_spans(talk: Talk) -> None:
    before = talk.engine.get_weight_version()
    messages, answers = await talk.gateway.talk(["hello"], seed=1)
    await talk.engine.load_weights_from_disk(talk.folder, "between")
    last = await talk.gateway.ask([*messages, user("go on")], seed=1)
    (branch,) = await talk.gateway.branches()
    assert branch["weight_versions"] == [
        {"version": version, "start": len(answer.prompt_token_ids), "end": len(ids_of(answer))}
        for version, answer in ((before, answers[0]), ("between", last))
    ]


async def test_an_update_during_a_turn_splits_its_span(talk: Talk) -> None:
    before = talk.engine.get_weight_version()
    asked = {"messages": [user("hello")], "max_tokens": 900, "ignore_eos": True, "return_token_ids": True}
    running = asyncio.create_task(talk.post("chat/completions", **asked))
    await until_running(talk.engine, 1)
    assert (await talk.gateway.http.post("/pause?mode=keep")).status_code == 200
    await talk.engine.load_weights_from_disk(talk.folder, "during", mode="retract")
    assert (await talk.gateway.http.post("/resume")).status_code == 200
    answer = await running
    (branch,) = await talk.gateway.branches()
    start, end = len(answer["prompt_token_ids"]), len(branch["token_ids"])
    *old, new = branch["weight_versions"]
    assert (new["version"], new["end"], end - start) == ("during", end, 900)
    assert old in ([], [{"version": before, "start": start, "end": new["start"]}]), "the pause may come before a token"
    talk.require_own_logprobs(branch)


# Tools, by each API --------------------------------------------------------------------------------------------------


async def require_the_lesson(talk: Talk) -> None:
    """Require one branch, in which the model called the tool, read its result and answered."""
    (branch,) = await talk.gateway.branches()
    assert "".join(text_of(run) for run in sampled(branch)) == f"{CALL}\n{ANSWER}\n"
    talk.require_own_logprobs(branch)


async def test_a_chat_with_a_tool_is_one_branch(talk: Talk) -> None:
    messages: list[Any] = [user(QUESTION)]
    first = await talk.gateway.ask(messages, tools=TOOLS, temperature=0, max_tokens=200)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert first.choices[0].finish_reason == "tool_calls"
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    second = await talk.gateway.ask(messages, tools=TOOLS, temperature=0, max_tokens=200)
    assert second.choices[0].message.content == ANSWER
    await require_the_lesson(talk)


def message_of(events: list[Any]) -> Any:
    """Return the message that a stream of Anthropic's events makes."""
    message = events[0]["message"]
    written: list[str] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            written.append("")
        elif event["type"] == "content_block_delta":
            written[-1] += event["delta"].get("text") or event["delta"].get("partial_json") or ""
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for block, text in zip(message["content"], written, strict=True):
        block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_of_anthropics_messages_is_one_branch(talk: Talk, stream: bool) -> None:
    async def ask(messages: list[Any]) -> Any:
        asked: Any = {"messages": messages, "tools": OF_ANTHROPIC, "max_tokens": 200, "temperature": 0}
        return message_of(await talk.events("messages", **asked)) if stream else await talk.post("messages", **asked)

    messages: list[Any] = [user(QUESTION)]
    first = await ask(messages)
    (call,) = first["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1, "b": 2})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "3"}
    second = await ask([*messages, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}])
    assert [block["text"] for block in second["content"]] == [ANSWER]
    assert second["stop_reason"] == "end_turn"
    await require_the_lesson(talk)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_of_responses_is_one_branch(talk: Talk, stream: bool) -> None:
    async def ask(given: list[Any]) -> Any:
        asked: Any = {"input": given, "tools": OF_RESPONSES, "max_output_tokens": 200, "temperature": 0}
        if not stream:
            return (await talk.post("responses", **asked))["output"]
        last = (await talk.events("responses", **asked))[-1]
        assert last["type"] == "response.completed"
        return last["response"]["output"]

    given: list[Any] = [user(QUESTION)]
    (call,) = await ask(given)
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1, "b": 2})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    (said,) = await ask([*given, call, result])
    assert said["content"][0]["text"] == ANSWER
    await require_the_lesson(talk)


async def test_one_conversation_may_go_through_all_apis(talk: Talk) -> None:
    fields: Any = {"temperature": 0}
    first = await talk.gateway.ask([user("hello")], **fields)
    said = first.choices[0].message.content
    messages = [user("hello"), {"role": "assistant", "content": said}, user("go on")]
    message = await talk.post("messages", messages=messages, max_tokens=12, **fields)
    messages += [{"role": "assistant", "content": message["content"][0]["text"]}, user("really?")]
    await talk.post("responses", input=messages, max_output_tokens=12, **fields)
    (branch,) = await talk.gateway.branches()
    assert branch["turns"] == [0, 1, 2]
    talk.require_own_logprobs(branch)
