"""The OpenAI API: the same generation under other names, with no field dropped."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from drivetrain.errors import InvalidRequest
from drivetrain.openai import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorBody,
    TextCompletion,
    TextCompletionChunk,
    Usage,
    error_body,
)
from drivetrain.openai.responses import ChatChoice, CompletionChoice, SampledLogprob
from drivetrain.text.tokenizer import REPLACEMENT
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.prompts import ChatPrompt, Message
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.same_answers import check_greedy, check_prefix, check_same_tokens
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, ordinary_ids, until_idle
from drivetrain_conformance.harness.time_limits import within
from drivetrain_conformance.references.oracle import log_softmax

Payload = dict[str, object]

_WHITE: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PMQ0AAAwDoPo33UrYvQQckD4XAQEBAQEBAQEBAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAYHLAMpT0sIcNbcEAAAAAElFTkSuQmCC"
)
"""An image of 64 by 64 white pixels, as PNG in base64."""
_FORCE: Final = 100.0
"""A logit bias that forces a token."""


# Generation ----------------------------------------------------------------------------------------------------------


@case()
async def a_chat_completion_is_what_generate_makes(bench: Bench) -> None:
    """A chat completion holds the tokens, text and finish reason that generate() returns for the same messages."""
    messages = _messages(bench)
    answer = await bench.engine.chat_completion(_greedy(messages=messages, max_tokens=10))
    prompt = ChatPrompt(messages=tuple(Message.model_validate(message) for message in messages))
    expected = (await bench.engine.generate([prompt], _params(10))).completions
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == expected[0].prompt_token_ids
    assert choice["message"]["role"] == "assistant"
    check_same_tokens(bench, _of_chat(answer, choice), expected[0])
    assert choice["message"]["content"] == bench.engine.decode(_shown(bench, choice["token_ids"]))


@case()
async def an_empty_list_of_tool_calls_changes_no_prompt(bench: Bench) -> None:
    """A turn of the history whose tool_calls are an empty list reaches the prompt as if it had no such field."""
    (asked,), turn = _messages(bench), {"role": "assistant", "content": "It is."}
    prompts = []
    for said in (turn, {**turn, "tool_calls": []}):
        answer = await bench.engine.chat_completion(_greedy(messages=[asked, said, asked], max_tokens=1))
        prompts.append(bench.engine.decode(answer["prompt_token_ids"]))
    assert prompts[1] == prompts[0], f"with an empty list of tool calls the prompt is {prompts[1]!r}: {prompts}"


@case()
async def a_completion_takes_text_and_ids_one_or_several(bench: Bench) -> None:
    """A prompt is a text or token ids, alone or several in a list; choices come in their order."""
    ids = bench.prompts(3)
    texts = [bench.engine.decode(prompt) for prompt in ids]
    of_texts = (await bench.engine.generate(texts, _params(8))).completions
    of_ids = (await bench.engine.generate(ids, _params(8))).completions
    asked: list[tuple[object, Sequence[Completion]]] = [
        (texts[0], of_texts[:1]),
        (texts, of_texts),
        (ids[0], of_ids[:1]),
        (ids, of_ids),
        ([texts[1], ids[2]], [of_texts[1], of_ids[2]]),
    ]
    for prompt, expected in asked:
        answer = await bench.engine.completion(_greedy(prompt=prompt, max_tokens=8))
        assert answer["object"] == "text_completion"
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        for choice, completion in zip(answer["choices"], expected, strict=True):
            check_same_tokens(bench, _of_text(choice), completion)
            assert choice["text"] == bench.engine.decode(_shown(bench, choice["token_ids"]))


@case()
async def max_tokens_is_16_unless_a_completion_says_otherwise(bench: Bench) -> None:
    """A completion without max_tokens has at most 16 tokens, as in the OpenAI API; null counts as absent."""
    prompts = bench.prompts(4)
    for fields in ({}, {"max_tokens": None, "n": None, "stop": None}):
        answer = await bench.engine.completion({"prompt": prompts, **fields})
        assert len(answer["choices"]) == 4
        for choice in answer["choices"]:
            assert len(choice["token_ids"]) == 16 or choice["finish_reason"] == "stop"


@case()
async def choices_are_counted_over_prompts_and_their_samples(bench: Bench) -> None:
    """Choices are numbered prompt by prompt, then sample by sample; each carries the ids of its prompt."""
    prompts = bench.prompts(2)
    answer = await bench.engine.completion({"prompt": prompts, "n": 3, "max_tokens": 4})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 3 + [prompts[1]] * 3
    chat = await bench.engine.chat_completion({"messages": _messages(bench), "n": 3, "max_tokens": 4})
    assert [choice["index"] for choice in chat["choices"]] == [0, 1, 2]


@case()
async def usage_counts_each_prompt_once_and_each_token(bench: Bench) -> None:
    """The usage counts each prompt once, whatever n, and every generated token."""
    prompts = [bench.prompt(5), bench.prompt(9)]
    answer = await bench.engine.completion({"prompt": prompts, "n": 2, "max_tokens": 6})
    generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
    _check_usage(answer["usage"], 14, generated)
    chat = await bench.engine.chat_completion({"messages": _messages(bench), "n": 3, "max_tokens": 5})
    generated = sum(len(choice["token_ids"]) for choice in chat["choices"])
    _check_usage(chat["usage"], len(chat["prompt_token_ids"]), generated)


@case(Capability.PREFIX_CACHE)
async def usage_says_what_was_cached(bench: Bench) -> None:
    """A prompt sent a second time reports cached tokens, and none after a reset of the cache."""
    payload = _greedy(prompt=bench.prompt(min(600, bench.engine.model_info.context_length // 2)), max_tokens=2)

    async def cached() -> int:
        return (await bench.engine.completion(payload))["usage"]["prompt_tokens_details"]["cached_tokens"]

    await bench.engine.reset_prefix_cache()
    assert await cached() == 0
    assert await cached() > 0
    await bench.engine.reset_prefix_cache()
    assert await cached() == 0


@case(Capability.VERSION_SPANS)
async def choices_carry_their_weight_versions(bench: Bench) -> None:
    """Each choice carries its weight version and the version spans of its tokens."""
    before = bench.engine.get_weight_version()
    try:
        await bench.engine.update_weight_version("another")
        answer = await bench.engine.completion(_greedy(prompt=bench.prompts(2), max_tokens=5))
    finally:
        await bench.engine.update_weight_version(before)
    for choice in answer["choices"]:
        assert choice["weight_version"] == "another"
        assert choice["weight_versions"] == [{"version": "another", "start": 0, "end": len(choice["token_ids"])}]


# Fields --------------------------------------------------------------------------------------------------------------

_SHIFTING: Final[Mapping[str, tuple[Capability, object, object]]] = {
    "frequency_penalty": (Capability.FREQUENCY_PENALTY, 2.0, 2.0),
    "presence_penalty": (Capability.PRESENCE_PENALTY, 2.0, 2.0),
    "repetition_penalty": (Capability.REPETITION_PENALTY, 3.0, 3.0),
    "logit_bias": (Capability.LOGIT_BIAS, {"40": _FORCE, "41": _FORCE}, {40: _FORCE, 41: _FORCE}),
}
"""Fields that change a greedy answer: their capability, a value in JSON, and its equivalent in SamplingParams."""

_NARROWING: Final[Mapping[str, tuple[Capability, object]]] = {
    "top_k": (Capability.TOP_K, 1),
    "top_p": (Capability.TOP_P, 1e-6),
    "min_p": (Capability.MIN_P, 1.0),
}
"""Fields with a value that leaves only the most likely token."""


def _make_shifting_case(field: str, capability: Capability, given: object, value: object) -> None:
    async def body(bench: Bench) -> None:
        prompts = bench.prompts(2)
        answer = await bench.engine.completion(_greedy(prompt=prompts, max_tokens=24, **{field: given}))
        params = SamplingParams.model_validate({"temperature": 0, "max_new_tokens": 24, field: value})
        expected = await bench.engine.generate(prompts, params)
        for choice, other in zip(answer["choices"], expected.completions, strict=True):
            assert choice["token_ids"] == other.token_ids

    body.__name__ = f"{field}_is_honoured"
    body.__doc__ = f"{field} in a request does what it does in SamplingParams."
    case(capability)(body)


def _make_narrowing_case(field: str, capability: Capability, value: object) -> None:
    async def body(bench: Bench) -> None:
        payload = {"prompt": bench.prompts(3), "max_tokens": 10, "temperature": 1.5, field: value}
        for choice in (await bench.engine.completion(payload))["choices"]:
            check_greedy(bench, _of_text(choice))

    body.__name__ = f"{field}_is_honoured"
    body.__doc__ = f"{field}={value} in a request leaves only the most likely token, at any temperature."
    case(capability)(body)


for _field, (_capability, _given, _value) in _SHIFTING.items():
    _make_shifting_case(_field, _capability, _given, _value)
for _field, (_capability, _value) in _NARROWING.items():
    _make_narrowing_case(_field, _capability, _value)


@case(Capability.SEED)
async def seed_is_honoured(bench: Bench) -> None:
    """A request with a seed draws the same tokens again, choice by choice, and as generate() does."""
    prompt = bench.prompt()
    payload: Payload = {"prompt": prompt, "n": 2, "max_tokens": 12, "seed": 7}
    first, second = [await bench.engine.completion(payload) for _ in range(2)]
    drawn = [choice["token_ids"] for choice in first["choices"]]
    assert drawn == [choice["token_ids"] for choice in second["choices"]]
    assert drawn[0] != drawn[1], "two choices drew the same tokens"
    expected = await bench.engine.generate([prompt], SamplingParams(n=2, max_new_tokens=12, seed=7))
    assert drawn == [completion.token_ids for completion in expected.completions]


@case(Capability.STOP_STRINGS)
async def stop_is_honoured(bench: Bench) -> None:
    """A stop string, alone or in a list, ends a choice; its text is cut before the string, and the string is named."""
    engine = bench.engine
    for run in await bench.greedy(bench.prompts(8), 16):
        stop = next((char for char in run.text[2:] if char != REPLACEMENT), None)
        if stop is None:
            continue
        for given in (stop, ["never said", stop]):
            answer = await engine.completion(_greedy(prompt=run.prompt_token_ids, max_tokens=16, stop=given))
            (choice,) = answer["choices"]
            check_prefix(bench, _of_text(choice), run)
            if choice["token_ids"] != run.token_ids[: len(choice["token_ids"])]:
                continue
            assert choice["text"] == run.text[: run.text.index(stop)]
            assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
            assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


@case(Capability.STOP_TOKEN_IDS)
async def stop_token_ids_are_honoured(bench: Bench) -> None:
    """A stop token id ends a choice and stays in its ids and usage, but not in its text."""
    engine = bench.engine
    for run in await bench.greedy(bench.prompts(4), 8):
        stop = run.token_ids[-1]
        count = run.token_ids.index(stop) + 1
        answer = await engine.completion(
            _greedy(prompt=run.prompt_token_ids, max_tokens=8, stop_token_ids=[stop], skip_special_tokens=False)
        )
        (choice,) = answer["choices"]
        check_prefix(bench, _of_text(choice), run)
        if choice["token_ids"] != run.token_ids[:count]:
            continue
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
        before = run.token_ids[: count - 1]
        assert choice["text"] == (engine.decode(before, skip_special_tokens=False) if before else "")
        assert answer["usage"]["completion_tokens"] == count


@case(Capability.LOGIT_BIAS)
async def eos_ends_a_choice(bench: Bench) -> None:
    """A choice that ends at EOS says stop; the token stays in its ids and usage."""
    eos = bench.engine.model_info.eos_token_ids[0]
    payload = _greedy(messages=_messages(bench), max_tokens=5, logit_bias={str(eos): _FORCE})
    answer = await bench.engine.chat_completion(payload)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["matched_stop"], choice["token_ids"]) == ("stop", eos, [eos])
    assert choice["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 1


@case(Capability.LOGIT_BIAS, Capability.IGNORE_EOS)
async def ignore_eos_is_honoured(bench: Bench) -> None:
    """With ignore_eos a choice continues past EOS to its full length."""
    eos = bench.engine.model_info.eos_token_ids[0]
    payload = _greedy(prompt=bench.prompt(), max_tokens=5, logit_bias={str(eos): _FORCE}, ignore_eos=True)
    (choice,) = (await bench.engine.completion(payload))["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", [eos] * 5)


@case(Capability.LOGIT_BIAS, Capability.MIN_NEW_TOKENS)
async def min_tokens_is_honoured(bench: Bench) -> None:
    """With min_tokens a choice does not end at EOS before it has that many tokens."""
    eos = bench.engine.model_info.eos_token_ids[0]
    payload = _greedy(prompt=bench.prompt(), max_tokens=9, logit_bias={str(eos): _FORCE}, min_tokens=4)
    (choice,) = (await bench.engine.completion(payload))["choices"]
    assert 4 <= len(choice["token_ids"]) <= 5
    assert choice["finish_reason"] == "stop"


@case(Capability.STRUCTURED_JSON)
async def response_format_is_honoured(bench: Bench) -> None:
    """response_format constrains the answer to its JSON schema."""
    schema = {"enum": ["yes", "no"]}
    payload: Payload = {
        "messages": _messages(bench),
        "max_tokens": 32,
        "n": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    for choice in (await bench.engine.chat_completion(payload))["choices"]:
        content = choice["message"]["content"]
        assert content is not None
        assert json.loads(content) in ("yes", "no")


@case(Capability.LORA, config={"enable_lora": True})
async def lora_is_honoured(bench: Bench) -> None:
    """The lora field selects the adapter; if it is not loaded, the request is refused, naming it."""
    refusal = await _chat_refusal(bench, {"messages": _messages(bench), "max_tokens": 2, "lora": "nobody"})
    assert refusal["error"]["param"] == "lora"
    assert "nobody" in refusal["error"]["message"]


@case(Capability.ABORT)
async def a_request_is_aborted_by_its_id(bench: Bench) -> None:
    """request_id becomes the answer's id, and aborting it returns the tokens so far, marked aborted."""
    engine = bench.engine
    await engine.abort("nobody")
    prompt = bench.prompt()
    params = bench.long()
    payload = _greedy(prompt=prompt, max_tokens=params.max_new_tokens, request_id="mine")
    if params.ignore_eos:
        payload["ignore_eos"] = True
    task = asyncio.create_task(engine.completion(payload))
    try:
        async with within():
            while not ((await engine.stats()).running or task.done()):  # noqa: ASYNC110 - it may be another process
                await asyncio.sleep(0.002)
            await engine.abort("mine")
            answer = await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    (choice,) = answer["choices"]
    assert answer["id"] == "mine"
    if choice["finish_reason"] == "length":
        raise TooLate("the request ended before it was aborted")
    assert choice["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    check_greedy(bench, _of_text(choice))


# Logprobs ------------------------------------------------------------------------------------------------------------


@case(Capability.LOGPROBS_RAW)
async def chat_logprobs_are_the_engines(bench: Bench) -> None:
    """logprobs=true gives one entry for each token of a chat completion: the token, its bytes and its logprob."""
    payload = {"messages": _messages(bench), "max_tokens": 8, "temperature": 0.6, "n": 2, "logprobs": True}
    answer = await bench.engine.chat_completion({**payload, "logprobs_mode": "raw"})
    for choice in answer["choices"]:
        content = _content(choice)
        _check_logprobs(bench, _of_chat(answer, choice), [entry["logprob"] for entry in content], 1.0)
        assert choice["logprobs_mode"] == "raw"
        for token, entry in zip(choice["token_ids"], content, strict=True):
            _check_token(bench, token, entry["token"], entry["bytes"])
            assert entry["top_logprobs"] == []
    plain = await bench.engine.chat_completion(payload | {"logprobs": False})
    assert [choice["logprobs"] for choice in plain["choices"]] == [None, None]


@case(Capability.LOGPROBS_RAW, Capability.TOP_LOGPROBS)
async def chat_top_logprobs_are_the_most_likely(bench: Bench) -> None:
    """top_logprobs=k adds the k most likely tokens at each position, most likely first."""
    payload = {"messages": _messages(bench), "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    answer = await bench.engine.chat_completion({**payload, "logprobs_mode": "raw"})
    (choice,) = answer["choices"]
    rows = log_softmax(bench.output_logits(_of_chat(answer, choice)))
    for row, entry in zip(rows, _content(choice), strict=True):
        found = [other["logprob"] for other in entry["top_logprobs"]]
        assert np.allclose(found, np.sort(row)[::-1][:3], atol=bench.tolerance()), f"{found} are not the most likely"
        assert len({other["token"] for other in entry["top_logprobs"]}) == 3


@case(Capability.LOGPROBS_PROCESSED, Capability.TOP_LOGPROBS, Capability.TOP_K)
async def answers_are_json_where_tokens_cannot_be_drawn(bench: Bench) -> None:
    """Answers are valid JSON even where tokens have a logprob of minus infinity."""
    drawn: Payload = {"top_k": 2, "logprobs_mode": "processed", "max_tokens": 3}
    answers = (
        await bench.engine.chat_completion(
            {"messages": _messages(bench), "logprobs": True, "top_logprobs": 5, **drawn}
        ),
        await bench.engine.completion({"prompt": bench.prompt(), "logprobs": 5, **drawn}),
    )
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["logprobs"] is not None
        json.dumps(answer, allow_nan=False)


@case(Capability.LOGPROBS_TEMPERATURE)
async def completion_logprobs_are_the_engines(bench: Bench) -> None:
    """logprobs=0 gives lists as long as the ids: tokens, their logprobs, and their offsets in the text."""
    payload = {"prompt": bench.prompts(2), "max_tokens": 10, "temperature": 0.6, "logprobs": 0}
    answer = await bench.engine.completion({**payload, "logprobs_mode": "temperature"})
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert found is not None
        _check_logprobs(bench, _of_text(choice), found["token_logprobs"], 0.6)
        assert choice["logprobs_mode"] == "temperature"
        assert len(found["tokens"]) == len(found["text_offset"]) == len(choice["token_ids"])
        assert found["text_offset"] == sorted(found["text_offset"])
        for token, text, offset in zip(choice["token_ids"], found["tokens"], found["text_offset"], strict=True):
            _check_token(bench, token, text, None)
            if token in ordinary_ids(bench.engine) and REPLACEMENT not in choice["text"]:
                assert choice["text"].startswith(text.strip(), offset + len(text) - len(text.lstrip()))


@case(Capability.LOGPROBS_RAW, Capability.TOP_LOGPROBS)
async def completion_top_logprobs_hold_the_token_itself(bench: Bench) -> None:
    """logprobs=k adds the k most likely tokens at each position and the drawn one, with their logprobs."""
    payload = {"prompt": bench.prompt(), "max_tokens": 8, "logprobs": 3, "logprobs_mode": "raw"}
    (choice,) = (await bench.engine.completion(payload))["choices"]
    found = choice["logprobs"]
    assert found is not None
    assert found["top_logprobs"] is not None
    rows = log_softmax(bench.output_logits(_of_text(choice)))
    for row, text, logprob, top in zip(
        rows, found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top is not None
        assert logprob is not None
        assert abs(top[text] - logprob) <= bench.tolerance()
        assert len(top) in (3, 4)
        best = sorted(top.values(), reverse=True)[:3]
        assert np.allclose(best, np.sort(row)[::-1][:3], atol=bench.tolerance()), f"{top} are not the most likely"


@case()
async def echo_begins_with_the_prompt(bench: Bench) -> None:
    """With echo each choice's text begins with its prompt; ids and usage are as without it."""
    payload = _greedy(prompt=bench.prompts(2), max_tokens=6)
    plain, echoed = await bench.engine.completion(payload), await bench.engine.completion({**payload, "echo": True})
    for one, other in zip(echoed["choices"], plain["choices"], strict=True):
        check_same_tokens(bench, _of_text(one), _of_text(other))
        after = bench.engine.decode(_shown(bench, one["token_ids"]))
        assert one["text"] == bench.engine.decode(one["prompt_token_ids"]) + after
    assert echoed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@case(Capability.LOGPROBS_RAW, Capability.PROMPT_LOGPROBS)
async def echo_with_logprobs_has_those_of_the_prompt(bench: Bench) -> None:
    """With echo and logprobs the lists cover prompt and output, all raw; the first token has no logprob."""
    payload = {"prompt": bench.prompt(7), "max_tokens": 5, "temperature": 0.6, "echo": True, "logprobs": 0}
    (choice,) = (await bench.engine.completion(payload))["choices"]
    _check_sequence(bench, choice)
    assert choice["logprobs_mode"] == "raw"


@case(Capability.LOGPROBS_RAW, Capability.PROMPT_LOGPROBS, Capability.SCORE_TOKENS)
async def max_tokens_0_with_echo_scores_a_text(bench: Bench) -> None:
    """With max_tokens=0, echo and logprobs a completion only scores its prompt, as evaluation harnesses require."""
    payload: Payload = {"prompt": bench.prompts(2, 9), "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = await bench.engine.completion(payload)
    for choice in answer["choices"]:
        _check_sequence(bench, choice)
        assert choice["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0


# Streams -------------------------------------------------------------------------------------------------------------


@case(Capability.STREAMING)
async def a_chat_stream_put_together_is_the_answer(bench: Bench) -> None:
    """Chunks bring a choice's role, its content, and its finish reason; together they are the whole answer."""
    payload = _greedy(messages=_messages(bench), max_tokens=12, n=2)
    chunks = await _chat_chunks(bench, {**payload, "stream": True})
    whole = await bench.engine.chat_completion(payload)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks), "usage was not asked for"
    for expected in whole["choices"]:
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        last = own[-1]
        assert last["delta"] == {}
        token_ids = [token for choice in own for token in choice["token_ids"]]
        content = "".join(choice["delta"].get("content", "") for choice in own)
        assert content == bench.engine.decode(_shown(bench, token_ids))
        assert last.get("prompt_token_ids") == whole["prompt_token_ids"]
        streamed = _completion(whole["prompt_token_ids"], token_ids, last["finish_reason"])
        check_same_tokens(bench, streamed, _of_chat(whole, expected))


@case(Capability.STREAMING)
async def a_completion_stream_put_together_is_the_answer(bench: Bench) -> None:
    """The chunks of each choice concatenate to the text and ids that the call without a stream returns."""
    payload = _greedy(prompt=bench.prompts(2), max_tokens=12, n=2)
    chunks = await _text_chunks(bench, payload)
    whole = await bench.engine.completion(payload)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    for expected in whole["choices"]:
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        token_ids = [token for choice in own for token in choice["token_ids"]]
        assert "".join(choice["text"] for choice in own) == bench.engine.decode(_shown(bench, token_ids))
        assert own[-1].get("prompt_token_ids") == expected["prompt_token_ids"]
        streamed = _completion(expected["prompt_token_ids"], token_ids, own[-1]["finish_reason"])
        check_same_tokens(bench, streamed, _of_text(expected))


@case(Capability.STREAMING)
async def a_streams_usage_comes_last_if_asked_for(bench: Bench) -> None:
    """With include_usage a last chunk without choices has the usage of all choices; in earlier chunks it is null."""
    options: Payload = {"stream": True, "stream_options": {"include_usage": True}}
    messages, prompts = _messages(bench), [bench.prompt(5), bench.prompt(9)]
    chat = await _chat_chunks(bench, {"messages": messages, "max_tokens": 4, "n": 2, **options})
    text = await _text_chunks(bench, {"prompt": prompts, "max_tokens": 4, "n": 2, **options})
    asked = (await bench.engine.chat_completion({"messages": messages, "max_tokens": 1}))["prompt_token_ids"]
    for chunks, prompt_tokens in ((chat, len(asked)), (text, 14)):
        assert [chunk.get("usage", "none") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        used = chunks[-1].get("usage")
        assert used is not None
        _check_usage(used, prompt_tokens, sum(len(c["token_ids"]) for chunk in chunks for c in chunk["choices"]))


@case(Capability.STREAMING, Capability.LOGPROBS_RAW)
async def a_streams_logprobs_come_with_their_tokens(bench: Bench) -> None:
    """Each chunk of a stream carries the logprobs of its own tokens."""
    raw: Payload = {"logprobs_mode": "raw", "max_tokens": 10, "temperature": 0.7}
    content: list[SampledLogprob] = []
    token_ids: list[int] = []
    prompt: list[int] = []
    for chunk in await _chat_chunks(bench, {"messages": _messages(bench), "logprobs": True, **raw}):
        (choice,) = chunk["choices"]
        token_ids += choice["token_ids"]
        found = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert len(found) == len(choice["token_ids"])
        content += found
        prompt = choice.get("prompt_token_ids", prompt)
    _check_logprobs(bench, _completion(prompt, token_ids, "length"), [entry["logprob"] for entry in content], 1.0)
    offset = 0
    for text_chunk in await _text_chunks(bench, {"prompt": bench.prompt(), "logprobs": 0, **raw}):
        (text_choice,) = text_chunk["choices"]
        lists = text_choice["logprobs"]
        assert len(lists["tokens"] if lists else []) == len(text_choice["token_ids"])
        for text_offset in lists["text_offset"] if lists else []:
            assert text_offset >= offset, "offsets do not go on where the chunk before ended"
            offset = text_offset


@case(Capability.STREAMING)
async def a_stream_that_is_closed_early_leaves_nothing_running(bench: Bench) -> None:
    """Closing a stream before its end aborts its requests."""
    params = bench.long()
    payload = _greedy(messages=_messages(bench), max_tokens=min(params.max_new_tokens or 1, 600), n=2)
    if params.ignore_eos:
        payload["ignore_eos"] = True
    stream = bench.engine.chat_completion_stream(payload)
    async for chunk in stream:
        if chunk["choices"][0]["token_ids"]:
            break
    await stream.aclose()
    await until_idle(bench.engine)


# Tool calls ----------------------------------------------------------------------------------------------------------

_TEMPLATE: Final = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
)
_PARAMETERS: Final[Payload] = {
    "a": {"type": "integer"},
    "city": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "note": {"type": ["string", "null"]},
    "unit": {"enum": ["1", "true"]},
    "sure": {"type": "boolean"},
    "size": {"type": "number"},
}
"""Parameters of the tool ``add``: strings that could be taken for numbers, and values that differ in Python."""


def _tagged(**arguments: str) -> str:
    """Return a call of ``add`` with one tag for each argument."""
    inner = "".join(f"<parameter={name}>{value}</parameter>" for name, value in arguments.items())
    return f"<tool_call><function=add>{inner}</function></tool_call>"


_WRITTEN: Final[Mapping[str, Sequence[Payload]]] = {
    _tagged(city="90210", note="true", unit="1"): [{"city": "90210", "note": "true", "unit": "1"}],
    _tagged(a="1", sure="True", note="None"): [{"a": 1, "sure": True, "note": None}],
    _tagged(city="a</parameter>b"): [{"city": "a</parameter>b"}],
    _tagged(size="1e400"): [],
    f"<think>{_tagged(a='1')}</think>{_tagged(a='2')}": [{"a": 2}],
    '<tool_call>{"name": "add", "arguments": null}</tool_call>': [{}],
    '<tool_call>{"name": "add", "arguments": ""}</tool_call>': [{}],
    '[TOOL_CALLS]add[ARGS]{"a": 3}': [{"a": 3}],
    '<tool_call>{"name": "none", "arguments": {"a": 4}}</tool_call>': [],
}
"""Generated texts, and the arguments of each call of the tool ``add`` that they hold."""


@case(Capability.STRUCTURED_REGEX, Capability.STREAMING, own_engine=True, slow=True)
async def tool_calls_are_read_from_the_text(bench: Bench) -> None:
    """Calls to the tools of a request come back as tool_calls with unique ids, also when streamed.

    Arguments have the types of the tool's schema. Text within reasoning, calls of unknown tools and numbers that JSON
    cannot hold stay content. With a tool_call_parser, calls in its syntax alone are read, whatever the chat template.
    """
    folder = bench.folder("tools") / "model"
    shutil.copytree(bench.model, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    payload = _asking_for_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') | {"n": 2}
    async with bench.open(model=str(folder)) as engine:
        answer = await engine.chat_completion(payload)
        chunks = [chunk async for chunk in engine.chat_completion_stream(payload)]
        read = await asyncio.gather(*(engine.chat_completion(_asking_for_calls(written)) for written in _WRITTEN))
    calls = [call for choice in answer["choices"] for call in choice["message"].get("tool_calls", [])]
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for found in (calls, streamed):
        assert [call["function"] for call in found] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in [*calls, *streamed]}) == 4, "ids of calls are not unique"
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    for (written, expected), other in zip(_WRITTEN.items(), read, strict=True):
        _check_read(other["choices"][0], written, expected)
    async with bench.open(model=str(folder), tool_call_parser="mistral") as engine:
        for written, expected in _WRITTEN_FOR_MISTRAL.items():
            answer = await engine.chat_completion(_asking_for_calls(written))
            _check_read(answer["choices"][0], written, expected)


def _asking_for_calls(written: str) -> Payload:
    """Return a request with the tool ``add`` whose answer is this text."""
    parameters = {"type": "object", "properties": _PARAMETERS}
    literally = "".join(f"\\{one}" if one in "{}[]" else one for one in written)
    return {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 200,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}],
        "structured_output": {"kind": "regex", "regex": literally},
    }


def _check_read(choice: ChatChoice, written: str, expected: Sequence[Payload]) -> None:
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    found = [call["arguments"] for call in calls]
    assert found == [json.dumps(one) for one in expected], f"in {written!r} the calls of add are {found}"
    assert {call["name"] for call in calls} <= {"add"}, f"in {written!r} the calls are {calls}"
    if not expected:
        content = choice["message"]["content"]
        assert content == written, f"{written!r} holds no call and comes back as {content!r}"


_WRITTEN_FOR_MISTRAL: Final[Mapping[str, Sequence[Payload]]] = {
    '[TOOL_CALLS]add[ARGS]{"a": 1}': [{"a": 1}],
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>': [],
}
"""Texts, each with the calls of ``add`` that a parser of Mistral's syntax finds in it."""
_ENDLESS: Final = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
"""A chat template that practically never ends."""


# Refusals ------------------------------------------------------------------------------------------------------------


_NUMBERS: Final = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Fields whose value may have a fraction."""


@case()
async def what_is_not_honoured_is_refused_by_name(bench: Bench) -> None:
    """A field that is unknown, out of range or unsupported is refused with OpenAI's error body, naming it."""
    good: Payload = {"messages": _messages(bench), "max_tokens": 2}
    vocabulary = bench.engine.model_info.vocab_size
    wrong: list[tuple[str, object]] = [
        ("max_token", 5),
        ("audio", {}),
        ("n", 0),
        ("temperature", -1),
        *((field, value) for field in _NUMBERS for value in (True, "0.5")),
        ("top_p", 1.5),
        ("max_tokens", -1),
        ("max_completion_tokens", 3),
        ("max_tokens", bench.engine.model_info.context_length),
        ("stop", ""),
        ("seed", -1),
        ("top_logprobs", 2),
        ("stream", True),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "json_schema"}),
        ("store", True),
        ("tool_choice", "auto"),
        ("lora", 5),
    ]
    for field, value in wrong:
        refusal = await _chat_refusal(bench, {**good, field: value})
        assert refusal["error"]["param"] == field, f"{field}={value!r}: {refusal}"
        assert field in refusal["error"]["message"]
    for nested, name in (
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": []}, "messages"),
        ({"chat_template_kwargs": {"chat_template": _ENDLESS}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ):
        refusal = await _chat_refusal(bench, {**good, **nested})
        assert refusal["error"]["param"] == name
    for field, value in (("best_of", 2), ("suffix", "x"), ("prompt", []), ("prompt", [[vocabulary]]), ("logprobs", -1)):
        refusal = await _text_refusal(bench, {"prompt": [1], **{field: value}})
        assert refusal["error"]["param"] == field, f"{field}={value!r}: {refusal}"


@case()
async def the_served_model_answers_to_its_name(bench: Bench) -> None:
    """The model field may be the served model's path or name, or absent; any other value is refused as not found."""
    served = bench.engine.config.model
    for name in (None, served, bench.model.name):
        answer = await bench.engine.completion({"prompt": bench.prompt(), "max_tokens": 1, "model": name})
        assert answer["model"] == (name or served)
    try:
        await bench.engine.completion({"prompt": bench.prompt(), "model": "another"})
    except InvalidRequest as error:
        status, body = error_body(error)
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    else:
        raise AssertionError("a model that is not served was accepted")


@case(Capability.IMAGES, model=ModelKind.VISION, slow=True)
async def images_in_messages_reach_the_prompt(bench: Bench) -> None:
    """Images in a message's parts take their places in the prompt beside its text."""
    text = {"type": "text", "text": "what is it?"}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_WHITE}"}}
    lengths: list[int] = []
    for parts in ([text], [image, text], [image, image, text]):
        payload: Payload = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        answer = await bench.engine.chat_completion(payload)
        assert answer["usage"]["completion_tokens"] > 0
        lengths.append(len(answer["prompt_token_ids"]))
    assert lengths[0] < lengths[1] < lengths[2], f"prompts without, with one and with two images: {lengths} tokens"


# ---------------------------------------------------------------------------------------------------------------------


def _messages(bench: Bench) -> list[Payload]:
    return [{"role": "user", "content": bench.engine.decode(bench.prompt())}]


def _greedy(**fields: object) -> Payload:
    return {"temperature": 0, **fields}


def _params(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0)


def _completion(prompt: list[int], token_ids: list[int], finish_reason: str | None) -> Completion:
    return Completion("", 0, 0, prompt, token_ids, "", FinishReason(finish_reason))


def _of_chat(answer: ChatCompletion, choice: ChatChoice) -> Completion:
    return _completion(answer["prompt_token_ids"], choice["token_ids"], choice["finish_reason"])


def _of_text(choice: CompletionChoice) -> Completion:
    return _completion(choice["prompt_token_ids"], choice["token_ids"], choice["finish_reason"])


def _shown(bench: Bench, token_ids: list[int]) -> list[int]:
    """Return the ids that appear in the text: all but a final EOS."""
    ended = token_ids and token_ids[-1] in bench.engine.model_info.eos_token_ids
    return token_ids[:-1] if ended else token_ids


def _content(choice: ChatChoice) -> list[SampledLogprob]:
    assert choice["logprobs"] is not None
    return choice["logprobs"]["content"]


def _check_usage(usage: Usage, prompt_tokens: int, completion_tokens: int) -> None:
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, completion_tokens)
    assert usage["total_tokens"] == prompt_tokens + completion_tokens
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= prompt_tokens


def _check_logprobs(bench: Bench, completion: Completion, found: Sequence[float | None], temperature: float) -> None:
    expected = bench.output_logprobs(completion, temperature)
    assert len(found) == len(expected)
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one is not None
        assert abs(one - other) <= bench.tolerance() / temperature, f"token {position}: {one}, expected {other}"


def _check_sequence(bench: Bench, choice: CompletionChoice) -> None:
    """Raise unless a choice with echo has the raw logprobs of prompt and output."""
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    found = choice["logprobs"]
    assert found is not None
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == len(ids)
    assert found["token_logprobs"][0] is None
    _check_logprobs(bench, _completion(ids[:1], ids[1:], "length"), found["token_logprobs"][1:], 1.0)
    assert choice["text"].startswith(bench.engine.decode(choice["prompt_token_ids"]))


def _check_token(bench: Bench, token: int, text: str, data: list[int] | None) -> None:
    """Raise unless a token's text is its decoding, if it decodes by itself."""
    alone = bench.engine.decode([token], skip_special_tokens=False)
    if REPLACEMENT in alone:
        assert text.startswith(("bytes:", "token_id:")) or REPLACEMENT in text
        return
    assert text.strip(" ") == alone.strip(" ")
    assert data is None or bytes(data).decode() == text


async def _chat_chunks(bench: Bench, payload: Payload) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in bench.engine.chat_completion_stream(payload)]


async def _text_chunks(bench: Bench, payload: Payload) -> list[TextCompletionChunk]:
    return [chunk async for chunk in bench.engine.completion_stream(payload)]


async def _chat_refusal(bench: Bench, payload: Payload) -> ErrorBody:
    try:
        answer: ChatCompletion | TextCompletion = await bench.engine.chat_completion(payload)
    except InvalidRequest as error:
        return _checked(error)
    raise AssertionError(f"{payload!r} was accepted: {answer}")


async def _text_refusal(bench: Bench, payload: Payload) -> ErrorBody:
    try:
        answer = await bench.engine.completion(payload)
    except InvalidRequest as error:
        return _checked(error)
    raise AssertionError(f"{payload!r} was accepted: {answer}")


def _checked(error: InvalidRequest) -> ErrorBody:
    status, body = error_body(error)
    assert status == 400
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    return body
