"""The token-capture gateway with answers that the tiny model does not write: reasoning and tool calls."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest
import pytest_asyncio
import tokenizers
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from drivetrain import ChatPrompt, InferenceEngine, TextPrompt
from drivetrain.text.tokenizer import Tokenizer
from drivetrain_serving.gateway.continuation import ids_after
from gateways import Gateway, gateway_of, ids_of, sampled, user
from scripted_backend import CALL, END, MERGED, ScriptedBackend, scripted_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS: Final[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Talking = tuple[Gateway, ScriptedBackend, InferenceEngine]


@pytest_asyncio.fixture(loop_scope="session")
async def talking(model: Path, tmp_path: Path) -> AsyncIterator[Talking]:
    async with scripted_engine(model, tmp_path / "model") as (engine, backend), gateway_of(engine) as gateway:
        yield gateway, backend, engine


async def test_a_prompt_reads_as_the_template_renders_it(talking: Talking) -> None:
    gateway, backend, engine = talking
    backend.says = ["well", "cut o…", "", "…", "bye"]
    messages, answers = await gateway.talk(["hello", "and then?", "go on", "really?", "hey?"])
    prompt = ChatPrompt.model_validate({"messages": tuple(messages[:-1])})
    whole = engine.tokenizer.encode(prompt)
    assert MERGED in whole
    assert answers[-1].prompt_token_ids == whole, "none of these answers has other ids when it is tokenised again"
    (branch,) = await gateway.branches()
    assert branch["turns"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([user("hi"), {"role": "assistant", "content": "part"}], {"continue_final_message": True}),
        ([user("hi")], {}),
    ],
)
async def test_what_follows_no_opening_of_an_answer_is_not_extended(
    talking: Talking, messages: list[Any], fields: dict[str, Any]
) -> None:
    gateway, backend, engine = talking
    backend.says = ["rest", "bye"]
    await gateway.ask(messages, add_generation_prompt=False, **fields)
    more = [*messages, {"role": "assistant", "content": "rest"}, user("more")]
    answer = await gateway.ask(more)
    assert answer.prompt_token_ids == engine.tokenizer.encode(ChatPrompt.model_validate({"messages": tuple(more)}))
    assert [branch["turns"] for branch in await gateway.branches()] == [[0], [1]]


@pytest.mark.parametrize("content", ["ab", "ab "])
async def test_of_answers_that_differ_in_spaces_the_one_that_came_back_is_extended(
    talking: Talking, content: str
) -> None:
    gateway, backend, _ = talking
    backend.says = ["ab", "ab ", "bye"]
    answer = await gateway.ask([user("hi")], n=2)
    (chosen,) = [choice for choice in answer.choices if choice.message.content == content]
    more = await gateway.ask([user("hi"), {"role": "assistant", "content": content}, user("more")])
    assert more.prompt_token_ids[: len(ids_of(answer, chosen.index))] == ids_of(answer, chosen.index)


def test_text_behind_any_id_is_not_the_beginning_of_a_text() -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "U": 5, ":": 6, "▁U": 7}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("▁", "U")], unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>"))
    assert tokenizer.encode(TextPrompt(text="U:", add_special_tokens=False)) == [7, 6]
    assert ids_after(tokenizer, "U:", 4, 100, "messages") == [5, 6]
    assert ids_after(tokenizer, "U:", 1, 100, "messages") == [5, 6]


async def test_answers_are_never_tokenised_again(talking: Talking) -> None:
    gateway, backend, engine = talking
    backend.says = ["hehe", "he…", " hey "]
    assert engine.tokenizer.encode(TextPrompt(text="hehe")) == [MERGED, MERGED]
    _, answers = await gateway.talk(["hehe", "he", "hey"], chat_template_kwargs={"trimmed": True})
    (branch,) = await gateway.branches()
    assert sampled(branch) == [[*b"hehe", END], [*b"he"], [*b" hey ", END]]
    assert branch["token_ids"].count(MERGED) == 4, "the user's messages are tokenised as ever"
    assert branch["token_ids"] == ids_of(answers[-1])


@pytest.mark.parametrize(("when", "why"), [("later", "once messages follow"), ("always", "reasoning")])
async def test_a_template_that_drops_reasoning_begins_a_branch_and_says_why(
    talking: Talking, when: str, why: str
) -> None:
    gateway, backend, _ = talking
    backend.says = ["<think>aha</think>well", "<think>so</think>good", "<think>no</think>bye"]
    _, answers = await gateway.talk(["hello", "and then?", "go on"], chat_template_kwargs={"drop_reasoning": when})
    branches = await gateway.branches()
    assert [branch["token_ids"] for branch in branches] == [ids_of(answer) for answer in answers]
    assert [branch["continues"] for branch in branches] == [None, 0, 1]
    assert all(why in branch["begins_because"] for branch in branches[1:])


@pytest.mark.parametrize("when", ["later", "always"])
async def test_answers_are_kept_against_the_template_if_told_to(talking: Talking, when: str) -> None:
    _, backend, engine = talking
    backend.says = ["<think>aha</think>well", "<think>cut o…", "<think>no</think>bye", "other tools"]
    fields: Any = {"chat_template_kwargs": {"drop_reasoning": when}}
    async with gateway_of(engine, keep_answers=True) as gateway:
        messages, answers = await gateway.talk(["hello", "and then?", "go on"], **fields)
        (branch,) = await gateway.branches()
        await gateway.ask([*messages, user("add")], tools=TOOLS, **fields)
        assert len(await gateway.branches()) == 2, "a prompt with other tools was not that of the earlier turns"
    assert sampled(branch) == [answer.choices[0].token_ids for answer in answers]
    assert engine.decode(branch["token_ids"], skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>aha</think>well<|im_end|>\n"
        "<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n<think>cut o<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n<think>no</think>bye<|im_end|>"
    )


async def test_a_template_that_keeps_reasoning_extends_it(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = ["<think>aha</think>well", "<think>so</think>good"]
    await gateway.talk(["hello", "and then?"])
    (branch,) = await gateway.branches()
    assert [bytes(run[:-1]).decode() for run in sampled(branch)] == ["<think>aha</think>well", "<think>so</think>good"]


async def test_a_template_that_trims_answers_still_extends_them(talking: Talking) -> None:
    gateway, backend, engine = talking
    backend.says = ["  well \n", "\ncut o …", " good ", "bye"]
    _, answers = await gateway.talk(["a", "b", "c", "d"], chat_template_kwargs={"trimmed": True})
    (branch,) = await gateway.branches()
    assert sampled(branch) == [answer.choices[0].token_ids for answer in answers]
    assert engine.decode(branch["token_ids"], skip_special_tokens=False) == "".join(
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>{after}"
        for said, answer, after in (
            ("a", "  well \n", "\n"),
            ("b", "\ncut o ", "\n"),
            ("c", " good ", "\n"),
            ("d", "bye", ""),
        )
    )


# Tools ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [CALL, "So: " + CALL, CALL + CALL])
@pytest.mark.parametrize("drops", [(), ("content", "type")])
@pytest.mark.parametrize(
    "template",
    [{}, {"opened": True}, {"strict": True}],
    ids=["plain", "writes the last answer differently", "refuses results without calls"],
)
async def test_a_call_is_the_same_however_its_arguments_are_written(
    talking: Talking, drops: Sequence[str], says: str, template: dict[str, bool]
) -> None:
    gateway, backend, engine = talking
    backend.says = [says, "two"]
    asked = [user("add")]
    first = await gateway.ask(asked, tools=TOOLS, chat_template_kwargs=template)
    message = first.choices[0].message.model_dump(exclude_none=True)
    calls = message["tool_calls"]
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), separators=(",", ":"))
    for name in drops:
        for fields in (*calls, *([message] if says == CALL else [])):
            fields.pop(name, None)
    asked += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls)]
    second = await gateway.ask(asked, tools=TOOLS, chat_template_kwargs=template)
    assert second.prompt_token_ids[: len(ids_of(first))] == ids_of(first)
    (branch,) = await gateway.branches()
    assert sampled(branch) == [first.choices[0].token_ids, second.choices[0].token_ids]
    answer = "<|im_start|>tool\n2<|im_end|>\n" * len(calls)
    text = engine.decode(second.prompt_token_ids, skip_special_tokens=False)
    assert text.endswith(f"{says}<|im_end|>\n{answer}<|im_start|>assistant\n"), "the call stays as it was sampled"


async def test_other_arguments_are_another_conversation(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = [CALL, "well"]
    first = await gateway.ask([user("add")], tools=TOOLS)
    message = first.choices[0].message.model_dump(exclude_none=True)
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 7}'
    await gateway.ask([user("add"), message, user("go on")], tools=TOOLS)
    assert len(await gateway.branches()) == 2


async def test_other_tools_are_another_prompt(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = [CALL, "well"]
    first = await gateway.ask([user("add")], tools=TOOLS)
    message = first.choices[0].message.model_dump(exclude_none=True)
    others = [{"type": "function", "function": {"name": "subtract"}}]
    await gateway.ask([user("add"), message, user("go on")], tools=others)
    _, other = await gateway.branches()
    assert other["continues"] == 0
    assert "before the answer" in other["begins_because"]


async def test_calls_of_a_stream_are_recognised(talking: Talking) -> None:
    gateway, backend, _ = talking
    backend.says = ["So: " + CALL, "well"]
    content, calls = "", []
    async with await gateway.api.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "add"}], tools=TOOLS, stream=True
    ) as chunks:
        async for chunk in chunks:
            content += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
    message = {"role": "assistant", "content": content, "tool_calls": [call.model_dump() for call in calls]}
    await gateway.ask([user("add"), message, user("go on")], tools=TOOLS)
    (branch,) = await gateway.branches()
    assert branch["turns"] == [0, 1]


async def test_experts_are_recorded_if_told_to(talking: Talking) -> None:
    _, backend, engine = talking
    backend.says = ["well", "good"]
    async with gateway_of(engine, routed_experts=True) as gateway:
        await gateway.talk(["hello", "go on"])
        trajectory = await gateway.trajectory()
    (branch,) = trajectory["branches"]
    packed = [turn["routed_experts"] for turn in trajectory["turns"]]
    assert [(one["shape"][1:], one["dtype"]) for one in packed] == [([1, 1], "uint16")] * 2
    found = [np.frombuffer(base64.b64decode(one["data"]), "<u2").tolist() for one in packed]
    assert found == sampled(branch), "the backend's expert of a token is its id"


class Add(BaseModel):
    a: int
    b: list[int]


async def test_openais_helpers_send_strict_tools(talking: Talking) -> None:
    """They check the arguments themselves; the prompt is that of the same tool without ``strict``."""
    gateway, backend, _ = talking
    backend.says = [CALL, CALL]
    tool = openai.pydantic_function_tool(Add, name="add")
    answer = await gateway.api.chat.completions.parse(
        model="policy", messages=[{"role": "user", "content": "add"}], tools=[tool],
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert answer.choices[0].message.tool_calls
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Add(a=1, b=[12])
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    other = await gateway.ask([user("add")], tools=[{"type": "function", "function": function}])
    assert other.prompt_token_ids == answer.prompt_token_ids  # type: ignore[attr-defined]
