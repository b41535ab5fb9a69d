"""OpenAI's Responses API, translated to chat completions and back. Pure functions, and one translator of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain_serving.gateway.errors import body_and_status
from drivetrain_serving.vllm.json_objects import Json

_OWN: Final = (
    *("input", "instructions", "max_output_tokens", "max_tokens", "parallel_tool_calls", "reasoning", "text", "tools"),
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
_ECHOED: Final = ("instructions", "max_output_tokens", "metadata", "temperature", "tools", "top_p", "user")


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
    if body.get("parallel_tool_calls") is False:
        chat["parallel_tool_calls"] = False
    reasoning, text = body.get("reasoning"), body.get("text")
    if isinstance(reasoning, Mapping) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    if isinstance(text, Mapping) and text.get("format"):
        chat["response_format"] = _format(text["format"])
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(_list(body["tools"], "tools"))]
    chat["messages"] = _messages(body.get("instructions"), body.get("input"))
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _messages(instructions: object, given: object) -> list[Json]:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input")
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
    """Add a message. Instructions and developers' messages at the beginning become one: many templates allow one."""
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in _list(content, where):
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


def _tool(tool: object, where: str) -> Json:
    match tool:
        case {"type": "function", "name": str(name), **more}:
            described = {key: more[key] for key in ("description", "parameters") if more.get(key) is not None}
            return {"type": "function", "function": {"name": name, **described}}
    raise InvalidRequest(f"{where}={shown(tool)}: expected a tool of type function, with a name", field=where)


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}={shown(value)}: expected a list", field=where)
    return value


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
        self._output: list[Json] = []
        self._text = ""
        self._message: Json | None = None
        self._reason = "stop"

    def whole(self, response: Json) -> Json:
        """Return a chat completion as a response."""
        (choice,) = response["choices"]
        message = choice["message"]
        self._reason = choice["finish_reason"]
        if message["content"]:
            self._output.append(_message(message["content"], self._status))
        self._output += [_call(call) for call in message.get("tool_calls") or []]
        return self._response(self._status, response["usage"])

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason in ("length", "abort") else "completed"

    def _response(self, status: str, usage: Json | None) -> Json:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = self._body.get("tool_choice")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **{name: self._body.get(name) for name in _ECHOED},
            "metadata": self._body.get("metadata") or {},
            "tools": self._body.get("tools") or [],
            "tool_choice": choice if choice is not None else "auto",
            "text": self._body.get("text") or {"format": {"type": "text"}},
        }

    # In events -----------------------------------------------------------------------------------------------------

    def start(self) -> Iterator[Json]:
        """Yield the first events."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", None))

    def events(self, chunk: Json) -> Iterator[Json]:
        """Yield the events of a chunk; the chunk with the usage is the last."""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                yield from self._add_text(delta["content"])
            for call in delta.get("tool_calls") or []:
                yield from self._add_call(call)
            self._reason = choice["finish_reason"] or self._reason
        if chunk.get("usage"):
            yield from self._close_text()
            yield self._event(f"response.{self._status}", response=self._response(self._status, chunk["usage"]))

    def error(self, error: DrivetrainError) -> Json:
        """Return the event of an error after the first event."""
        body, _ = body_and_status(error)
        event = self._event("error", code=type(error).__name__, message=str(error), param=None)
        return {**event, "drivetrain": body["drivetrain"]}

    def _add_text(self, text: str) -> Iterator[Json]:
        at = len(self._output)
        if self._message is None:
            self._message = _message("", "in_progress")
            opened = {**self._message, "content": []}
            yield self._event("response.output_item.added", output_index=at, item=opened)
            yield self._part("response.content_part.added", part=_part(""))
        self._text += text
        yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def _close_text(self) -> Iterator[Json]:
        if self._message is None:
            return
        done = {**self._message, "status": self._status, "content": [_part(self._text)]}
        yield self._part("response.output_text.done", text=self._text, logprobs=[])
        yield self._part("response.content_part.done", part=_part(self._text))
        yield self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._message, self._text = None, ""

    def _add_call(self, call: Json) -> Iterator[Json]:
        yield from self._close_text()
        item, at = _call(call), len(self._output)
        opened = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=at, item=opened)
        about = {"item_id": item["id"], "output_index": at}
        yield self._event("response.function_call_arguments.delta", **about, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **about, name=item["name"], arguments=item["arguments"]
        )
        yield self._event("response.output_item.done", output_index=at, item=item)
        self._output.append(item)

    def _part(self, kind: str, **fields: object) -> Json:
        assert self._message is not None
        about = {"item_id": self._message["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **about, **fields)

    def _event(self, kind: str, **fields: object) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _message(text: str, status: str) -> Json:
    return {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "status": status,
        "role": "assistant",
        "content": [_part(text)],
    }


def _part(text: str) -> Json:
    annotations: Sequence[object] = []
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


def _call(call: Json) -> Json:
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{uuid.uuid4().hex}",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
