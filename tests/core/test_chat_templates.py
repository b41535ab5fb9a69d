"""Chat templates: the variables that a request may set, and limits that keep a template from blocking an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from drivetrain import ChatPrompt, DeadlineExceeded, InvalidRequest, Message
from drivetrain.testing import byte_tokenizer
from drivetrain.text import chat_templates as rendering
from drivetrain.text.call_timeout import bounded
from drivetrain.text.tokenizer import Tokenizer

_FOR = "{% for a in range(99999) %}"
LOOPS = _FOR * 3 + "{% endfor %}" * 3
HI = (Message(role="user", content="hi"),)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "messages",
        "conversation",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "tokenizer_kwargs",
        "self",
        "return_assistant_tokens_mask",
        "raise_exception",
    ],
)
def test_a_variable_cannot_take_the_place_of_an_argument(name: str) -> None:
    prompt = ChatPrompt(messages=HI, template_kwargs={name: LOOPS})
    with pytest.raises(InvalidRequest, match=f"'{name}' is no variable") as refusal:
        rendering.render(tokenizer(f"{{{{ messages[0].content }}}} {name}"), prompt)
    assert refusal.value.field == "template_kwargs"


def test_variables_are_checked_before_anything_is_rendered() -> None:
    refused: list[dict[str, JsonValue]] = [{"chat_template": LOOPS}, {"thinking": True}]
    for variables in refused:
        with pytest.raises(InvalidRequest):
            rendering.render(tokenizer(LOOPS), ChatPrompt(messages=HI, template_kwargs=variables))


def test_variables_reach_the_template() -> None:
    template = "{{ thinking }} {{ documents[0].text }} {{ bos_token }}"
    variables = {"thinking": False, "documents": [{"title": "a", "text": "b"}], "bos_token": "<b>"}
    assert rendering.render(tokenizer(template), ChatPrompt(messages=HI, template_kwargs=variables)) == "False b <b>"


@pytest.mark.parametrize("calls", [[], None])
def test_a_message_without_calls_keeps_its_text(calls: JsonValue) -> None:
    template = "{% for m in messages %}{% if 'tool_calls' in m %}calls{% else %}{{ m.content }}{% endif %}{% endfor %}"
    answer = {"role": "assistant", "content": "a text", "tool_calls": calls}
    prompt = ChatPrompt(messages=(*HI, Message.model_validate(answer), *HI))
    assert rendering.render(tokenizer(template), prompt) == "hia texthi"


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LONGEST_S", 0.2)
    inner = Tokenizer(tokenizer(LOOPS))
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="chat template"):
            inner.encode(ChatPrompt(messages=HI))
    assert time.monotonic() - began < 20
    inner.inner.chat_template = "{{ messages[0].content }}"
    assert inner.encode(ChatPrompt(messages=HI)) == list(b"hi")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[5].content.x }}",
        "{{ raise_exception('no') }}",
        "{{ messages | tojson | length + 'x' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "{{ [] | first | int('x', 'y') }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused") as refusal:
        rendering.render(tokenizer(template), ChatPrompt(messages=HI))
    assert refusal.value.field == "prompts"


# Time limits ---------------------------------------------------------------------------------------------------------


def forever() -> None:
    while True:
        pass


def stubborn() -> None:
    for _ in range(3):
        try:
            forever()
        except BaseException:
            continue


@pytest.mark.parametrize("call", [forever, stubborn])
def test_code_that_does_not_end_is_ended(call: Callable[[], None]) -> None:
    if call is forever:
        with pytest.raises(DeadlineExceeded, match=r"timed out after 0.1 s waiting for it"):
            bounded(call, 0.1, "it")
    else:
        bounded(call, 0.1, "it")  # the code swallows the exception, and returns by itself later


def test_what_is_in_time_is_left_alone() -> None:
    assert bounded(lambda: 5, 10.0, "it") == 5
    with pytest.raises(KeyError):
        bounded(lambda: {"a": 1}["x"], 10.0, "it")


def test_nothing_hangs_and_nothing_is_raised_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let many calls end just at their deadline: no lock stays held, and no later code gets the exception."""
    monkeypatch.setattr("drivetrain.text.call_timeout._LOOK_S", 0.002)
    hit: list[BaseException] = []
    ended: list[DeadlineExceeded] = []

    def race() -> None:
        try:
            for turn in range(200):
                seconds = 0.001 * (1 + turn % 7)
                try:
                    bounded(partial(spin, seconds + 0.0007 * (turn % 5)), seconds, "it")
                except DeadlineExceeded as error:
                    ended.append(error)
                spin(0.0005)
        except BaseException as error:
            hit.append(error)

    def spin(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    threads = [threading.Thread(target=race, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    assert hit == []
    assert ended
