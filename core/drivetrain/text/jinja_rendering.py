"""Rendering a chat template as transformers does, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue: the template's output after the mark is cut off."""
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Fields under which a message's reasoning comes; templates read the first, those of gpt-oss the second."""


def render_template(
    template: str, messages: list[dict[str, Any]], continue_final_message: bool, variables: Mapping[str, Any]
) -> str:
    """Return the text of ``messages``.

    Args:
        template: Source of the chat template.
        messages: Plain JSON values. Fields that are None are left out.
        continue_final_message: Leave the last message open, so that generation continues it.
        variables: Values that the template can read beside ``messages``.

    Raises:
        ValueError: There is nothing in the last message to continue, or the template drops it.
        TemplateError: The template refuses the messages.
    """
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    chat = [_as_read(message) for message in messages]
    final = _mark_end(chat, template) if continue_final_message else ""
    text = _compiled(template).render(messages=chat, **variables)
    if not continue_final_message:
        return text
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat "
            "template! This can happen if the chat template deletes portions of the final message."
        )
    end = text.rindex(_TAG.strip())
    kept = text[:end]
    return kept if text[end : end + len(_TAG)] == _TAG else kept.rstrip()  # else the template strips messages


def _as_read(message: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(chat: list[dict[str, Any]], template: str) -> str:
    """Put the tag behind the last message's text; return that text."""
    content = chat[-1].get("content")
    if content is None:
        raise ValueError('continue_final_message is set but the final message has no "content" to continue!')
    if "content" not in template:
        raise ValueError('continue_final_message is set to "content" but this is not a field of the chat_template')
    if isinstance(content, str):
        chat[-1]["content"] = content + _TAG
        return content
    for index in reversed(range(len(content))):
        if "text" in content[index]:
            text: str = content[index]["text"]
            chat[-1]["content"] = [*content[:index], {**content[index], "text": text + _TAG}, *content[index + 1 :]]
            return text
    raise ValueError("continue_final_message is set but we could not find any text to continue in the final message!")


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _TemplateNamespace
    return environment.from_string(template)


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the model's own text for trainers; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """Refuses underscored names: they would reach Python's internals past the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:  # as Namespace does, so that ``namespace(self=…)`` works
        itself, *given = args
        given_values = dict(*given, **values)
        for name in given_values:
            _refuse_internal(name)
        Namespace.__init__(itself, given_values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        Namespace.__setitem__(self, name, value)


def _refuse_internal(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"Chat templates cannot store underscore-prefixed attributes on a namespace: {name!r}.")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
