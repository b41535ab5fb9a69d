"""Rendering of chat messages with the tokenizer's chat template.

A template is a program: the variables that a request sets are checked, and its run time is limited.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from drivetrain.checks.pydantic_errors import shown_name
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DeadlineExceeded, InvalidRequest
from drivetrain.text.call_timeout import bounded
from drivetrain.types.prompts import ChatPrompt, Message

if TYPE_CHECKING:
    from pydantic import JsonValue

    from drivetrain.text.inner_tokenizer import InnerTokenizer

LONGEST_S: Final = 20.0
"""Timeout in seconds for one rendering; most take less than a millisecond."""
_FIELDS: Final = {
    "chat_template": "the model's own chat template is used",
    "messages": "messages are a field of their own",
    "conversation": "messages are a field of their own",
    "conversations": "messages are a field of their own",
    "tools": "tools are a field of their own",
    "add_generation_prompt": "it is a field of its own",
    "continue_final_message": "it is a field of its own",
    "generation_indices": "it is the tokenizer's own",
    "raise_exception": "it is the tokenizer's own",
}
"""Names that a request may not set as template variables, each with the reason. The tokenizer method's own arguments
are refused as well."""
_VARIABLES: Final = frozenset({"documents"})
"""Arguments of the tokenizer's method that a request may set nevertheless, since templates read them."""


def render(inner: InnerTokenizer, prompt: ChatPrompt) -> str:
    """Render a chat prompt to text.

    Raises:
        InvalidRequest: There is no chat template, it rejects the messages, or it does not read a given variable.
        DeadlineExceeded: The rendering took longer than :data:`LONGEST_S`.
    """
    template = template_of(inner, prompt.tools)
    if template is None:
        raise InvalidRequest(
            "chat messages were given, but this model's tokenizer has no chat template; send text or token ids",
            field="prompts",
        )
    _check_variables(inner, prompt.template_kwargs)
    _check_template_reads(template, prompt)
    messages = [_as_read(message) for message in prompt.messages]
    variables: dict[str, Any] = prompt.template_kwargs

    def rendered() -> object:
        return inner.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in prompt.tools] or None,
            add_generation_prompt=prompt.add_generation_prompt and not prompt.continue_final_message,
            continue_final_message=prompt.continue_final_message,
            tokenize=False,
            **variables,
        )

    try:
        text = bounded(rendered, LONGEST_S, "the chat template to render the messages")
    except DeadlineExceeded:
        raise
    except Exception as error:  # a template is a program and can raise anything
        why = str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"the chat template refused the messages: {why:.2000}", field="prompts") from error
    assert isinstance(text, str)
    return text


def template_of(inner: InnerTokenizer, tools: Sequence[Mapping[str, JsonValue]]) -> str | None:
    """Return the chat template for messages with these tools; None if there is none."""
    if not inner.chat_template:
        return None
    try:
        return str(inner.get_chat_template(tools=[dict(tool) for tool in tools] or None))
    except ValueError as error:  # several templates and no default
        raise InvalidRequest(f"the tokenizer's chat templates: {error}", field="prompts") from error


def _check_variables(inner: InnerTokenizer, given: Mapping[str, JsonValue]) -> None:
    """Refuse variables that would replace the template or an argument of the rendering call."""
    if not given:
        return
    arguments = inspect.signature(inner.apply_chat_template).parameters.keys() - _VARIABLES
    for name in given:
        if name in _FIELDS or name in arguments or name == "self":
            why = _FIELDS.get(name, "it is an argument of the tokenizer's")
            raise InvalidRequest(f"{name!r} is no variable of the chat template: {why}", field="template_kwargs")


def reads_variable(template: str, name: str) -> bool:
    """Return whether the source of a chat template has a variable's name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _check_template_reads(template: str, prompt: ChatPrompt) -> None:
    """Refuse variables that the template does not read; they would be dropped in silence."""
    given = [("tools", "tools")] if prompt.tools else []
    for field, name in [*given, *(("template_kwargs", name) for name in prompt.template_kwargs)]:
        if not reads_variable(template, name):
            raise InvalidRequest(
                f"this model's chat template does not read {shown(shown_name(name))}; leave it out", field=field
            )


def _as_read(message: Message) -> dict[str, Any]:
    """Return a message as a mapping, without an empty ``tool_calls``: many templates then expect no text."""
    fields = message.model_dump(exclude_unset=True)
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    return fields
