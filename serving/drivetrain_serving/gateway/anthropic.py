"""Anthropic's Messages API, translated to chat completions and back. Pure functions, and one translator of streams."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.openai.responses import FinishReasonName, ToolCallDelta
from drivetrain.text.chat_templates import reads_variable
from drivetrain.tool_calls.functions import as_arguments
from drivetrain.tool_calls.schemas import Parameters
from drivetrain_serving.gateway import answer_types as types
from drivetrain_serving.gateway.errors import body_and_status
from drivetrain_serving.http_layer.bodies import flag_of, list_of
from drivetrain_serving.http_layer.error_statuses import described
from drivetrain_serving.vllm.answer_types import ChatChunk, ChatCompletion, ChatUsageChunk, DetailedUsage
from drivetrain_serving.vllm.json_objects import Json, final_usage

_OWN: Final = (
    *("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "stop", "stream_options"),
    *("output_format", "output_config", "metadata", "service_tier", "context_management", "logprobs", "top_logprobs"),
)
"""Fields that are translated, or that change no answer; the others are those of chat completions."""
_REFUSED: Final = ("container", "mcp_servers", "logprobs", "top_logprobs", "n")
_ACCOUNTING: Final = "x-anthropic-billing-header:"
"""Beginning of a system block that some agents change with each request; it is not for the model."""
_ONE_CALL: Final = "disable_parallel_tool_use"
_CHOICES: Final = {"auto": "auto", "none": "none", "any": "required"}
_STOP_REASONS: Final[Mapping[FinishReasonName, types.StopReason]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "max_tokens",
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ThreadUnsupported(InvalidRequest):
    """The request asks the server to hold the conversation's messages. Clients can send them all instead."""


def to_chat(body: Mapping[str, object], template: str) -> Json:
    """Return a Messages request as a chat completion request.

    Args:
        body: The request.
        template: The model's chat template. It gets ``enable_thinking`` if it reads it.

    Raises:
        InvalidRequest: A field cannot be read or honoured.
    """
    if body.get("thread"):
        raise ThreadUnsupported("thread: messages are not kept for later requests; send them all", field="thread")
    for name in _REFUSED:
        if body.get(name):
            raise InvalidRequest(f"{name}={shown(body[name])} is not supported; leave it out", field=name)
    chat: Json = {name: value for name, value in body.items() if name not in _OWN and value is not None}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    chat["messages"] = _system(body.get("system"))
    for index, message in enumerate(list_of(body.get("messages"), "messages")):
        chat["messages"] += _messages(message, f"messages.{index}")
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":  # the answer goes on from its text
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    config = body.get("output_config")
    config = config if isinstance(config, Mapping) else {}
    if output := body.get("output_format") or config.get("format"):
        chat["response_format"] = _format(output)
    if config.get("effort"):
        chat["reasoning_effort"] = config["effort"]
    if body.get("tools"):
        tools = enumerate(list_of(body["tools"], "tools"))
        chat["tools"] = [_tool(tool, f"tools.{index}") for index, tool in tools]
    choice = body.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = _choice(choice)
    if chat.get("tool_choice") not in (None, "auto", "none"):
        _check_inputs(chat.get("tools", ()), chat["tool_choice"])
    if isinstance(choice, Mapping) and flag_of(choice.get(_ONE_CALL), f"tool_choice.{_ONE_CALL}"):
        chat["parallel_tool_calls"] = False
    thinking = body.get("thinking")
    if isinstance(thinking, Mapping) and reads_variable(template, "enable_thinking"):
        given = chat.get("chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled", **given}
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _choice(choice: object) -> object:
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in _CHOICES:
            return _CHOICES[kind]
    raise InvalidRequest(
        f"tool_choice={shown(choice)}: expected a type of auto, any or none, or of tool with a name",
        field="tool_choice",
    )


def _check_inputs(tools: Sequence[Json], choice: object) -> None:
    """Refuse tools whose demanded call might have an input that is no object; Anthropic's messages hold no others."""
    for index, tool in enumerate(tools):
        if isinstance(choice, Mapping) and choice["function"]["name"] != tool["function"]["name"]:
            continue
        schema = tool["function"]["parameters"]
        if schema and Parameters(schema).types != {"object"}:  # an empty one stands for no parameters
            where = f"tools.{index}.input_schema"
            raise InvalidRequest(
                f"{where}={shown(schema)}: the input of a demanded call is an object; give a schema of type object",
                field=where,
            )


def _format(output: object) -> Json:
    match output:
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    raise InvalidRequest(f"output_format={shown(output)}: expected a json_schema with a schema", field="output_format")


def _system(system: object) -> list[Json]:
    if not system:
        return []
    texts = [system] if isinstance(system, str) else [_text(block, "system") for block in list_of(system, "system")]
    said = [text for text in texts if not text.startswith(_ACCOUNTING)]
    return [{"role": "system", "content": "\n".join(said)}] if said else []


def _messages(message: object, where: str) -> Iterator[Json]:
    """Yield the chat messages of one message: results of tools are messages of their own there."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(
            f"{where}={shown(message)}: expected a role of user or assistant, and content", field=where
        )
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = list_of(content, f"{where}.content")
    if not blocks and role != "assistant":
        raise InvalidRequest(f"{where}.content is empty; expected a text or blocks", field=f"{where}.content")
    if role == "assistant":
        yield _assistant(blocks, f"{where}.content")
        return
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            yield from _user(role, texts)
            texts = []
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _result(block.get("content"), f"{where}.content.{index}"),
            }
        else:
            texts.append(_text(block, f"{where}.content.{index}"))
    yield from _user(role, texts)


def _user(role: str, texts: Sequence[str]) -> Iterator[Json]:
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(blocks: Sequence[object], where: str) -> Json:
    texts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": arguments}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                texts.append(_text(block, f"{where}.{index}"))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    return message | {"tool_calls": calls} if calls else message


def _result(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(block, where) for block in list_of(content, where))


def _text(block: object, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    raise InvalidRequest(
        f"{where}={shown(block)}: expected text; sessions record text and tool calls only", field=where
    )


def _tool(tool: object, where: str) -> Json:
    match tool:
        case {"type": str(kind)} if kind != "custom":
            pass
        case {"name": str(name), "input_schema": dict(schema), **more}:
            if schema.get("type", "object") != "object":
                raise InvalidRequest(
                    f"{where}.input_schema.type={shown(schema['type'])}: expected 'object'",
                    field=f"{where}.input_schema.type",
                )
            described = {"description": more["description"]} if more.get("description") else {}
            return {"type": "function", "function": {"name": name, **described, "parameters": schema}}
    raise InvalidRequest(f"{where}={shown(tool)}: expected a tool with a name and an input_schema", field=where)


# Answers -------------------------------------------------------------------------------------------------------------


def from_chat(response: ChatCompletion) -> types.AnthropicMessage:
    """Return a chat completion as a message."""
    (choice,) = response["choices"]
    message = choice["message"]
    content: list[types.Block] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = as_arguments(function["arguments"])
        if arguments is not None:  # else the call of a named tool was cut off
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    ending = _ending(choice["finish_reason"], choice["stop_reason"], calls=bool(message["tool_calls"]))
    return _message(response["model"], content, ending, _usage(response["usage"]))


def _message(
    model: str, content: list[types.Block], ending: types.MessageEnding, usage: types.MessageUsage
) -> types.AnthropicMessage:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **ending,
        "usage": usage,
    }


def _ending(reason: FinishReasonName, matched: int | str | None, *, calls: bool) -> types.MessageEnding:
    if isinstance(matched, str) and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    if calls and reason == "stop":  # of a named function, as in the OpenAI API
        reason = "tool_calls"
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _usage(usage: DetailedUsage) -> types.MessageUsage:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


class MessageEvents:
    """Translates the chunks of one streamed chat completion to the events of a message.

    Args:
        model: The model's name in answers.
        prompt_length: Number of prompt ids.
    """

    def __init__(self, model: str, prompt_length: int) -> None:
        self._model = model
        self._prompt_length = prompt_length
        self._blocks = 0
        self._text_is_open = self._call_is_open = self._calls = False
        self._ending: types.MessageEnding = {"stop_reason": None, "stop_sequence": None}

    def start(self) -> types.MessageStart:
        """Return the first event."""
        usage: types.MessageUsage = {
            "input_tokens": self._prompt_length,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        message = _message(self._model, [], {"stop_reason": None, "stop_sequence": None}, usage)
        return {"type": "message_start", "message": message}

    def events(self, chunk: ChatChunk | ChatUsageChunk) -> Iterator[types.MessageEvent]:
        """Yield the events of a chunk; the chunk with the usage is the last."""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("content"):
                yield from self._text(text)
            for part in delta.get("tool_calls", []):
                yield from self._call(part)
            if choice["finish_reason"] is not None:
                self._ending = _ending(choice["finish_reason"], choice["stop_reason"], calls=self._calls)
        if usage := final_usage(chunk):
            yield from self._close()
            yield {"type": "message_delta", "delta": self._ending, "usage": _usage(usage)}
            yield {"type": "message_stop"}

    def _text(self, text: str) -> Iterator[types.MessageEvent]:
        if not self._text_is_open:
            yield from self._close()
            self._text_is_open = True
            yield self._block({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _call(self, part: ToolCallDelta) -> Iterator[types.MessageEvent]:
        function = part["function"]
        if "id" in part and "name" in function:
            yield from self._close()
            self._call_is_open = self._calls = True
            yield self._block({"type": "tool_use", "id": part["id"], "name": function["name"], "input": {}})
        if function["arguments"]:
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _close(self) -> Iterator[types.MessageEvent]:
        """End the open block, if there is one."""
        if self._text_is_open or self._call_is_open:
            self._text_is_open = self._call_is_open = False
            yield self._stop()

    def _block(self, block: types.Block) -> types.BlockStart:
        return {"type": "content_block_start", "index": self._blocks, "content_block": block}

    def _delta(self, delta: types.TextDelta | types.InputDelta) -> types.BlockDelta:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _stop(self) -> types.BlockStop:
        self._blocks += 1
        return {"type": "content_block_stop", "index": self._blocks - 1}


# Errors --------------------------------------------------------------------------------------------------------------


def error_of(error: DrivetrainError) -> tuple[types.AnthropicError, int]:
    """Return the body and the status of an error."""
    _, status = body_and_status(error)
    answer = http_error(status, str(error))
    answer["drivetrain"] = described(error)
    if isinstance(error, ThreadUnsupported):
        answer["error"]["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return answer, status


def http_error(status: int, message: str) -> types.AnthropicError:
    """Return the body of an error."""
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(status, "api_error"), "message": message}}
