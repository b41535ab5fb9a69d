"""OpenAI's Responses API, translated to chat completions and back. Pure functions, and one translator of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.openai.forced_calls import add_parts
from drivetrain.openai.responses import FinishReasonName, ToolCall, ToolCallDelta
from drivetrain.tool_calls import strict_json
from drivetrain_serving.gateway import answer_types as types
from drivetrain_serving.http_layer.bodies import flag_of, list_of
from drivetrain_serving.http_layer.error_statuses import described
from drivetrain_serving.vllm.answer_types import ChatChunk, ChatCompletion, ChatUsageChunk, DetailedUsage
from drivetrain_serving.vllm.json_objects import Json, final_usage

_OWN: Final = (
    *("input", "instructions", "max_output_tokens", "max_tokens", "parallel_tool_calls", "reasoning", "text", "tools"),
    "tool_choice",
    *("truncation", "include", "top_logprobs", "logprobs", "stream_options", "previous_response_id", "conversation"),
    *("prompt", "background", "max_tool_calls", "store", "metadata", "user", "service_tier", "prompt_cache_key"),
)
"""Fields that are translated, refused, or that change no answer; the others are those of chat completions."""
_LOGPROBS: Final = "message.output_text.logprobs"
_REFUSED: Final = {
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "conversation": "responses are not stored; send the whole conversation as input",
    "prompt": "prompts are not stored; send the text as instructions and input",
    "background": "responses are not stored; wait for the answer",
    "max_tool_calls": "tools are called by the client",
    "top_logprobs": "logprobs are in the trajectory",
    "logprobs": "logprobs are in the trajectory",
    "n": "there is one response",
}
_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS: Final = ("input_text", "output_text", "text")
_Whole = Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"]


def to_chat(body: Mapping[str, object]) -> Json:
    """Return a Responses request as a chat completion request.

    Raises:
        InvalidRequest: A field cannot be read or honoured.
    """
    for name, remedy in _REFUSED.items():
        if body.get(name):
            raise InvalidRequest(f"{name}={shown(body[name])} is not supported: {remedy}", field=name)
    if body.get("truncation") not in (None, "disabled"):
        raise InvalidRequest(f"truncation={shown(body['truncation'])}: nothing is truncated", field="truncation")
    include = body.get("include")
    if isinstance(include, list) and _LOGPROBS in include:
        raise InvalidRequest(f"include={_LOGPROBS!r} is not supported: logprobs are in the trajectory", field="include")
    chat: Json = {name: value for name, value in body.items() if name not in _OWN and value is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _choice(body["tool_choice"])
    if not flag_of(body.get("parallel_tool_calls"), "parallel_tool_calls", default=True):
        chat["parallel_tool_calls"] = False
    reasoning, text = body.get("reasoning"), body.get("text")
    if isinstance(reasoning, Mapping) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    if isinstance(text, Mapping) and text.get("format"):
        chat["response_format"] = _format(text["format"])
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(list_of(body["tools"], "tools"))]
    chat["messages"] = _messages(body.get("instructions"), body.get("input"))
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _messages(instructions: object, given: object) -> list[Json]:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given, "input")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        where = f"input.{index}"
        match item:
            case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(output, where)})
            case {"role": str(role), "content": content, **more} if (
                role in _ROLES and more.get("type", "message") == "message"
            ):
                _add(messages, _ROLES[role], _text(content, where))
            case _:
                raise InvalidRequest(
                    f"{where}={shown(item)}: expected a message, function_call or function_call_output; sessions take "
                    "text and tool calls only",
                    field=where,
                )
    return messages


def _add(messages: list[Json], role: str, text: str) -> None:
    """Add a message. System messages at the beginning are merged: many chat templates allow only one."""
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in list_of(content, where):
        match part:
            case {"type": kind, "text": str(text)} if kind in _TEXTS:
                texts.append(text)
            case _:
                raise InvalidRequest(f"{where}={shown(part)}: expected text; sessions take text only", field=where)
    return "\n".join(texts)


def _format(given: object) -> object:
    """Return the output format in the form of chat completions, which nest the schema."""
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    schema = {name: given[name] for name in ("name", "schema", "strict") if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _choice(choice: object) -> object:
    """Return a choice of tools in the form of chat completions, which nest the function's name."""
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _tool(tool: object, where: str) -> Json:
    match tool:
        case {"type": "function", "name": str(name), **more}:
            described = {key: more[key] for key in ("description", "parameters") if more.get(key) is not None}
            return {"type": "function", "function": {"name": name, **described}}
    raise InvalidRequest(f"{where}={shown(tool)}: expected a tool of type function, with a name", field=where)


# Answers -------------------------------------------------------------------------------------------------------------


class ResponseWriter:
    """Writes one chat completion, whole or streamed, as a response.

    Args:
        body: The request.
        model: The model's name in answers.
    """

    def __init__(self, body: Mapping[str, object], model: str) -> None:
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._body = body
        self._model = model
        self._sequence = 0
        self._output: list[types.OutputItem] = []
        self._text = ""
        self._message: types.OutputMessage | None = None
        self._called: list[ToolCall] = []
        self._item: types.FunctionCallItem | None = None
        self._reason: FinishReasonName = "stop"

    def whole(self, response: ChatCompletion) -> types.OpenAIResponse:
        """Return a chat completion as a response."""
        (choice,) = response["choices"]
        message = choice["message"]
        self._reason = choice["finish_reason"]
        if message["content"]:
            self._output.append(_message(message["content"], self._status))
        self._output += [_call(call) for call in message["tool_calls"]]
        return self._response(self._status, response["usage"])

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._reason in ("length", "abort") else "completed"

    def _response(self, status: types.ItemStatus, usage: DetailedUsage | None) -> types.OpenAIResponse:
        body = self._body
        choice = body.get("tool_choice")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "temperature": body.get("temperature"),
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "user": body.get("user"),
            "tool_choice": choice if choice is not None else "auto",
            "text": body.get("text") or {"format": {"type": "text"}},
        }

    # In events -----------------------------------------------------------------------------------------------------

    def start(self) -> Iterator[types.ResponsesEvent]:
        """Yield the first events."""
        yield self._whole_event("response.created", "in_progress", None)
        yield self._whole_event("response.in_progress", "in_progress", None)

    def events(self, chunk: ChatChunk | ChatUsageChunk) -> Iterator[types.ResponsesEvent]:
        """Yield the events of a chunk; the chunk with the usage is the last."""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("content"):
                yield from self._add_text(text)
            for part in delta.get("tool_calls", []):
                yield from self._add_part(part)
            self._reason = choice["finish_reason"] or self._reason
        if usage := final_usage(chunk):
            yield from self._close_text()
            yield from self._close_call()
            kind: _Whole = "response.completed" if self._status == "completed" else "response.incomplete"
            yield self._whole_event(kind, self._status, usage)

    def error(self, error: DrivetrainError) -> types.ResponseErrorEvent:
        """Return the event of an error after the first event."""
        return {
            "type": "error",
            "sequence_number": self._next(),
            "code": type(error).__name__,
            "message": str(error),
            "param": None,
            "drivetrain": described(error),
        }

    def _whole_event(self, kind: _Whole, status: types.ItemStatus, usage: DetailedUsage | None) -> types.ResponseEvent:
        return {"type": kind, "sequence_number": self._next(), "response": self._response(status, usage)}

    def _add_text(self, text: str) -> Iterator[types.ResponsesEvent]:
        if self._message is None:
            self._message = _message("", "in_progress")
            yield self._item_event("response.output_item.added", {**self._message, "content": []})
            yield {"type": "response.content_part.added", **self._place(self._message), "part": _part("")}
        self._text += text
        yield {"type": "response.output_text.delta", **self._place(self._message), "delta": text, "logprobs": []}

    def _close_text(self) -> Iterator[types.ResponsesEvent]:
        if self._message is None:
            return
        text, message = self._text, self._message
        yield {"type": "response.output_text.done", **self._place(message), "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **self._place(message), "part": _part(text)}
        done: types.OutputMessage = {**message, "status": self._status, "content": [_part(text)]}
        yield self._item_event("response.output_item.done", done)
        self._output.append(done)
        self._message, self._text = None, ""

    def _add_part(self, part: ToolCallDelta) -> Iterator[types.ResponsesEvent]:
        if "id" in part:
            yield from self._close_text()
            yield from self._close_call()
        add_parts(self._called, [part])
        if self._item is None:
            self._item = {**_call(self._called[-1]), "arguments": "", "status": "in_progress"}
            yield self._item_event("response.output_item.added", self._item)
        yield {
            "type": "response.function_call_arguments.delta",
            "sequence_number": self._next(),
            "item_id": self._item["id"],
            "output_index": len(self._output),
            "delta": part["function"]["arguments"],
        }

    def _close_call(self) -> Iterator[types.ResponsesEvent]:
        if self._item is None:
            return
        arguments = self._called[-1]["function"]["arguments"]
        item: types.FunctionCallItem = {**self._item, "arguments": arguments, "status": _status_of(arguments)}
        yield {
            "type": "response.function_call_arguments.done",
            "sequence_number": self._next(),
            "item_id": item["id"],
            "output_index": len(self._output),
            "name": item["name"],
            "arguments": arguments,
        }
        yield self._item_event("response.output_item.done", item)
        self._output.append(item)
        self._item = None

    def _item_event(
        self, kind: Literal["response.output_item.added", "response.output_item.done"], item: types.OutputItem
    ) -> types.ItemEvent:
        return {"type": kind, "sequence_number": self._next(), "output_index": len(self._output), "item": item}

    def _place(self, message: types.OutputMessage) -> types.PlaceOfPart:
        return {
            "sequence_number": self._next(),
            "item_id": message["id"],
            "output_index": len(self._output),
            "content_index": 0,
        }

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def _message(text: str, status: types.ItemStatus) -> types.OutputMessage:
    return {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "status": status,
        "role": "assistant",
        "content": [_part(text)],
    }


def _part(text: str) -> types.OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall) -> types.FunctionCallItem:
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{uuid.uuid4().hex}",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": _status_of(function["arguments"]),
    }


def _status_of(arguments: str) -> types.ItemStatus:
    try:
        strict_json.loads(arguments)
    except ValueError:  # the call of a named function was cut off
        return "incomplete"
    return "completed"


def _usage(usage: DetailedUsage) -> types.ResponseUsage:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
