"""OpenAI's routes, as every server has them."""

from __future__ import annotations

import json
from typing import Final

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.server_answers import Field
from drivetrain_conformance.routes.server_under_test import CannotRun, RouteRefused, Target, ok

MESSAGES: Final = [{"role": "user", "content": "hello"}]
BIG_SEED: Final = 2**63 - 1


async def complete(target: Target, **fields: object) -> Field:
    """Return the answer to a completion of at most four tokens."""
    body = {"model": target.model, "prompt": "hello", "max_tokens": 4, **fields}
    return (await target.post("/v1/completions", body)).json()


async def chat(target: Target, **fields: object) -> Field:
    """Return the answer to a chat of at most four tokens."""
    body = {"model": target.model, "messages": MESSAGES, "max_tokens": 4, **fields}
    return (await target.post("/v1/chat/completions", body)).json()


@route_case
async def health_is_200(target: Target) -> None:
    """``/health`` is 200. TRL polls for ever on any other status; AReaL, slime and prime-rl wait for it."""
    await target.get("/health")


@route_case
async def models_are_listed(target: Target) -> None:
    """Each card of ``/v1/models`` has ``id``, ``object``, ``created`` and ``owned_by``. TRL takes the first ``id``."""
    listed = (await target.get("/v1/models")).json()
    listed["object"].equals("list")
    for card in listed["data"].entries():
        card["id"].text()
        card["object"].equals("model")
        card["created"].integer()
        card["owned_by"].text()


@route_case
async def a_completion_has_choices_and_usage(target: Target) -> None:
    """A completion has ``choices`` with text and finish reason, and ``usage`` that adds up. Every client reads them."""
    answer = await complete(target)
    answer["id"].text()
    answer["object"].equals("text_completion")
    answer["choices"][0]["text"].text()
    assert answer["choices"][0]["finish_reason"].text() in ("stop", "length"), answer["choices"][0].shown
    _require_usage(answer)


@route_case
async def a_chat_has_a_message_and_usage(target: Target) -> None:
    """A chat has a message of the assistant and ``usage`` that adds up. Gateways such as rLLM's read them."""
    answer = await chat(target)
    answer["choices"][0]["message"]["role"].equals("assistant")
    assert answer["choices"][0]["finish_reason"].text() in ("stop", "length"), answer["choices"][0].shown
    _require_usage(answer)


def _require_usage(answer: Field) -> None:
    usage = answer["usage"]
    counted = usage["prompt_tokens"].integer() + usage["completion_tokens"].integer()
    usage["total_tokens"].equals(counted)


@route_case
async def choices_are_numbered(target: Target) -> None:
    """With ``n: 2`` there are choices 0 and 1, in order. TRL slices the list."""
    answer = await complete(target, n=2)
    indices = [choice["index"].integer() for choice in answer["choices"].entries()]
    assert indices == [0, 1], f"choices are numbered {indices}"


@route_case
async def nulls_mean_absent(target: Target) -> None:
    """``stop``, ``seed`` and ``logprobs`` may be null. TRL and SkyRL send every field they know."""
    await complete(target, stop=None, seed=None, logprobs=None)


@route_case
async def seeds_have_63_bits(target: Target) -> None:
    """A seed of 63 bits is taken. TRL's async trainer draws such seeds."""
    await complete(target, seed=BIG_SEED)


@route_case
async def a_seed_gives_the_same_text_again(target: Target) -> None:
    """Two requests with one seed give one text. Trainers that replay rollouts need it."""
    one, other = [(await complete(target, seed=7, temperature=1, max_tokens=8))["choices"][0]["text"] for _ in "ab"]
    other.equals(one.text())


@route_case
async def chat_logprobs_have_an_entry_for_each_token(target: Target) -> None:
    """``logprobs.content`` of a chat has one entry per token, each with a token and a finite logprob. NeMo-Gym zips."""
    answer = await chat(target, logprobs=True, top_logprobs=1)
    entries = answer["choices"][0]["logprobs"]["content"].entries()
    for entry in entries:
        entry["token"].text()
        entry["logprob"].number()
        entry["top_logprobs"].entries()
    answer["usage"]["completion_tokens"].equals(len(entries))


TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}
_NAMED: Final = {"type": "function", "function": {"name": "f"}}
_SPACES: Final = (" ", "\t", "\n", "\r")


async def _demanding(target: Target, likely: str, **fields: object) -> dict[str, object]:
    """Return a chat that demands a call. A bias makes the call of a model with random weights end, or others follow.

    Args:
        target: The server.
        likely: A text that the model writes where it may. White space is forbidden.
        **fields: Fields of the request.
    """
    bias: dict[str, int] = {}
    for text, value in ((likely, 100), *((space, -100) for space in _SPACES)):
        asked = {"model": target.model, "prompt": text, "add_special_tokens": False}
        answer = await target.ask("POST", "/tokenize", asked)
        if answer.status == 200 and len(ids := answer.json()["tokens"].ids()) == 1:
            bias[str(ids[0])] = value
    return {
        "model": target.model,
        "messages": MESSAGES,
        "tools": [TOOL],
        "max_tokens": 80,
        "temperature": 0,
        "logit_bias": bias,
        **fields,
    }


async def _called(target: Target, body: dict[str, object]) -> Field:
    """Return the choice of an answer that must hold calls of the tool, each with an object of the schema."""
    answer = await target.ask("POST", "/v1/chat/completions", body)
    if answer.status == 400:
        raise RouteRefused(f"{answer.asked}: {answer.shown}")
    choice = ok(answer).json()["choices"][0]
    calls = choice["message"]["tool_calls"].entries()
    assert calls, f"{choice['message'].path} has no call"
    for call in calls:
        call["id"].text()
        call["function"]["name"].equals("f")
        _require_arguments(call["function"]["arguments"].text())
    return choice


def _require_arguments(text: str) -> None:
    try:
        arguments = json.loads(text)
    except ValueError:
        raise AssertionError(f"the arguments {text!r} are not JSON") from None
    right = isinstance(arguments, dict) and all(key == "a" and type(one) is bool for key, one in arguments.items())
    assert right, f"the arguments {text!r} are not of the tool's schema"


@route_case
async def a_required_call_comes(target: Target) -> None:
    """``tool_choice: required`` gives calls of the tools, with the schema's arguments. Agents of verifiers run them."""
    choice = await _called(target, await _demanding(target, "]", tool_choice="required"))
    choice["finish_reason"].equals("tool_calls")


@route_case
async def a_required_call_comes_in_a_stream(target: Target) -> None:
    """A stream of ``tool_choice: required`` has the calls in deltas. OpenAI's client joins them by their index."""
    body = await _demanding(target, "]", tool_choice="required")
    await _called(target, body)
    arguments: dict[int, str] = {}
    reason = None
    async with target.streaming("/v1/chat/completions", body) as stream:
        for event in await stream.rest():
            for choice in event["choices"].entries():
                delta = choice["delta"].mapping()
                for part in choice["delta"]["tool_calls"].entries() if delta.get("tool_calls") else ():
                    index = part["index"].integer()
                    if index not in arguments:
                        part["id"].text()
                        part["function"]["name"].equals("f")
                    given = part["function"].mapping().get("arguments")
                    arguments[index] = arguments.get(index, "") + (given if isinstance(given, str) else "")
                reason = choice["finish_reason"].value or reason
    assert arguments, "the stream has no call"
    for text in arguments.values():
        _require_arguments(text)
    assert reason == "tool_calls", f"the stream ends in {reason!r}; expected 'tool_calls'"


@route_case
async def a_call_of_a_named_function_comes(target: Target) -> None:
    """``tool_choice`` of a function gives one call of it. Agents that make the model end a rollout demand it."""
    choice = await _called(target, await _demanding(target, "]", tool_choice=_NAMED))
    found = len(choice["message"]["tool_calls"].entries())
    assert found == 1, f"{choice['message']['tool_calls'].path} has {found} calls; expected one"
    assert choice["finish_reason"].text() in ("stop", "tool_calls"), choice["finish_reason"].shown


@route_case
async def one_call_comes_without_parallel_calls(target: Target) -> None:
    """``parallel_tool_calls: false`` gives one call, however many the model would make. Agents run one at a time."""
    body = await _demanding(target, ",", tool_choice="required", parallel_tool_calls=False)
    choice = await _called(target, body)
    found = len(choice["message"]["tool_calls"].entries())
    assert found == 1, f"{choice['message']['tool_calls'].path} has {found} calls; expected one"
    choice["finish_reason"].equals("tool_calls")


@route_case
async def a_stream_ends_in_a_finish_reason_and_done(target: Target) -> None:
    """A stream's last choice has the finish reason, and ``[DONE]`` follows. OpenAI's client and gateways read so."""
    body = {"model": target.model, "prompt": "hello", "max_tokens": 4}
    async with target.streaming("/v1/completions", body) as stream:
        events = await stream.rest()
    assert stream.is_done, "the stream ends without [DONE]"
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"].entries()]
    assert reasons, "the stream has no choice"
    assert reasons[-1].text() in ("stop", "length"), reasons[-1].shown


@route_case
async def a_wrong_type_is_a_client_error(target: Target) -> None:
    """A field of a wrong type is refused with 4xx and a JSON object. Clients repeat what fails with 5xx."""
    body = {"model": target.model, "prompt": "hello", "max_tokens": "four"}
    (await target.refused("/v1/completions", body)).json().mapping()


@route_case
async def a_wrong_value_is_a_client_error(target: Target) -> None:
    """A negative temperature is refused with 4xx and a JSON object. Clients repeat what fails with 5xx."""
    body = {"model": target.model, "prompt": "hello", "temperature": -1}
    (await target.refused("/v1/completions", body)).json().mapping()


@route_case
async def a_body_that_is_no_json_is_a_client_error(target: Target) -> None:
    """A body that is no JSON is refused with 4xx and a JSON object. Clients repeat what fails with 5xx."""
    (await target.refused("/v1/completions", '{"prompt":')).json().mapping()


@route_case
async def a_prompt_that_is_too_long_says_so(target: Target) -> None:
    """A prompt beyond the context is refused with 400 and the words "context length".

    renderers and NeMo-Gym look for them, and end the rollout with ``length``.
    """
    if target.context is None:
        raise CannotRun("the model's card has no max_model_len")
    body = {"model": target.model, "prompt": [5] * (target.context + 8), "max_tokens": 4}
    answer = await target.refused("/v1/completions", body)
    assert answer.status == 400, f"{answer.shown}; expected 400"
    assert "context length" in answer.content.decode().lower(), f'{answer.shown}: no "context length"'
