"""The prompt of a request to ``/tokenize``, in either dialect."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.openai.messages import to_template
from drivetrain.types.prompts import ChatPrompt, Message, Prompt, TextPrompt


def prompt_of_body(body: Mapping[str, object]) -> Prompt:
    """Return the text of ``prompt``, or the chat of ``messages``.

    Raises:
        InvalidRequest: the body holds neither, or the messages are wrong.
    """
    if isinstance(text := body.get("prompt"), str):
        return TextPrompt(text=text, add_special_tokens=body.get("add_special_tokens") is not False)
    try:
        messages, _ = to_template(tuple(Message.model_validate(one) for one in _list(body, "messages")))
        return ChatPrompt.model_validate(
            {
                "messages": messages,
                "tools": _list(body, "tools") if body.get("tools") else (),
                "add_generation_prompt": body.get("add_generation_prompt") is not False,
                "continue_final_message": body.get("continue_final_message") is True,
                "template_kwargs": body.get("chat_template_kwargs") or {},
            }
        )
    except ValidationError as error:
        raise InvalidRequest(describe_validation_error(error, ChatPrompt)[1], field="messages") from None


def _list(body: Mapping[str, object], name: str) -> list[object]:
    value = body.get(name)
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}={shown(value)}: expected a list", field=name)
    return value
