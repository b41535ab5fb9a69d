"""The prompt of a request to ``/tokenize``, in either dialect."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.openai.messages import to_template
from drivetrain.types.prompts import ChatPrompt, Message, Prompt, TextPrompt
from drivetrain_serving.http_layer.bodies import flag_of
from drivetrain_serving.http_layer.route_docs import Fields


class PromptFields(Fields):
    """Fields of a body that hold its prompt."""

    prompt: object = Field(default=None, description="A text.", json_schema_extra={"type": ["string", "null"]})
    add_special_tokens: object = Field(
        default=None,
        description="Let the tokenizer add special tokens such as BOS to a text.",
        json_schema_extra={"type": ["boolean", "null"]},
    )
    messages: tuple[Message, ...] | None = Field(default=None, description="A conversation, if there is no prompt.")
    tools: object = Field(
        default=None,
        description="Functions that the model may call.",
        json_schema_extra={"type": ["array", "null"], "items": {"type": "object"}},
    )
    add_generation_prompt: object = Field(
        default=None,
        description="End the prompt with the assistant's opening; true if not given.",
        json_schema_extra={"type": ["boolean", "null"]},
    )
    continue_final_message: object = Field(
        default=None, description="Continue the last message.", json_schema_extra={"type": ["boolean", "null"]}
    )
    chat_template_kwargs: object = Field(
        default=None,
        description="Additional variables of the chat template.",
        json_schema_extra={"type": ["object", "null"]},
    )


def prompt_of_body(body: Mapping[str, object]) -> Prompt:
    """Return the text of ``prompt``, or the chat of ``messages``.

    Raises:
        InvalidRequest: the body holds neither, or the messages are wrong.
    """
    text = body.get("prompt")
    if isinstance(text, str):
        special = flag_of(body.get("add_special_tokens"), "add_special_tokens", default=True)
        return TextPrompt(text=text, add_special_tokens=special)
    if text is not None:
        raise InvalidRequest(f"prompt={shown(text)}: expected a text; or give messages", field="prompt")
    try:
        messages, _ = to_template(tuple(Message.model_validate(one) for one in _list(body, "messages")))
        return ChatPrompt.model_validate(
            {
                "messages": messages,
                "tools": _list(body, "tools") if body.get("tools") else (),
                "add_generation_prompt": flag_of(
                    body.get("add_generation_prompt"), "add_generation_prompt", default=True
                ),
                "continue_final_message": flag_of(body.get("continue_final_message"), "continue_final_message"),
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
