"""Tool calls that a request demands: the JSON schema of the output, and the calls in it as its text comes.

As in vLLM and SGLang, the output for ``tool_choice="required"`` is an array of ``{"name": …, "parameters": …}``. For a
named function it is the arguments alone.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from pydantic import JsonValue

from drivetrain.openai.payloads import ChatPayload, NamedToolChoice
from drivetrain.openai.responses import ToolCall, ToolCallDelta
from drivetrain.openai.schemas import grammar_of_schema
from drivetrain.tool_calls import strict_json
from drivetrain.types.sampling import DATA, REFERENCES, JsonSchema

_NO_PARAMETERS: Final[dict[str, JsonValue]] = {"type": "object", "properties": {}}
"""Schema of a tool that gives none."""
_HEAD: Final = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=[^\s,}\]:])')
"""A call in the array up to its arguments; the schema fixes the order of the two keys."""
_SCALAR: Final = re.compile(r"[^\s,}]*")
"""A number, ``true``, ``false`` or ``null``, as far as it has come."""
_TAIL: Final = re.compile(r"\s*\}")


def schema_of_calls(asked: ChatPayload) -> JsonSchema | None:
    """Return the schema of an output that holds the demanded calls; None if the request demands none.

    Raises:
        InvalidRequest: A reference of a tool's schema cannot be followed.
    """
    functions: dict[str, Mapping[str, JsonValue]] = {}
    for tool in asked.tools:
        function = tool["function"]
        assert isinstance(function, dict)
        given = function.get("parameters")
        functions[str(function["name"])] = given if given and isinstance(given, dict) else _NO_PARAMETERS
    match asked.tool_choice:
        case NamedToolChoice():
            schema: Mapping[str, JsonValue] = functions[asked.tool_choice.function.name]
        case "required":
            schema = _schema_of_array(functions, most=1 if asked.parallel_tool_calls is False else None)
        case _:
            return None
    return grammar_of_schema(schema, "tools")


def _schema_of_array(functions: Mapping[str, Mapping[str, JsonValue]], most: int | None) -> dict[str, JsonValue]:
    definitions: dict[str, JsonValue] = {}
    calls: list[JsonValue] = []
    for index, (name, parameters) in enumerate(functions.items()):
        grammar_of_schema(parameters, "tools")  # its errors name references as the tool has them
        place = f"#/$defs/{index}"
        definitions[str(index)] = _moved(dict(parameters), place)
        call: dict[str, JsonValue] = {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        calls.append(call)
    schema: dict[str, JsonValue] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if most is None else {**schema, "maxItems": most}


def _moved(part: JsonValue, place: str) -> JsonValue:
    """Return a part of a schema with its references as they are once the whole schema lies at ``place``."""
    match part:
        case dict():
            moved: dict[str, JsonValue] = {}
            for key, one in part.items():
                if key in REFERENCES and isinstance(one, str):
                    moved[key] = place + one.removeprefix("#")
                else:
                    moved[key] = one if key in DATA and not isinstance(one, dict) else _moved(one, place)
            return moved
        case list():
            return [_moved(one, place) for one in part]
    return part


class CallReader(Protocol):
    """Reads the demanded calls of one choice from its text, piece by piece."""

    @property
    def complete(self) -> int:
        """Number of calls whose arguments have ended, as far as the reader can tell."""
        ...

    def push(self, text: str) -> list[ToolCallDelta]:
        """Add text; return the new parts of calls."""
        ...


def reader_of(asked: ChatPayload) -> CallReader | None:
    """Return a reader for one choice; None if the request demands no call."""
    if isinstance(asked.tool_choice, NamedToolChoice):
        return _NamedCall(asked.tool_choice.function.name)
    return _CallsInArray() if asked.tool_choice == "required" else None


def calls_in(text: str, reader: CallReader) -> list[ToolCall]:
    """Return the calls in a whole text, without a call of an array that was cut off."""
    calls: list[ToolCall] = []
    add_parts(calls, reader.push(text))
    return calls[: reader.complete]


def add_parts(calls: list[ToolCall], parts: Iterable[ToolCallDelta]) -> None:
    """Add the parts of a stream to its calls so far."""
    for part in parts:
        function = part["function"]
        if "id" in part and "name" in function:
            whole: ToolCall = {
                "id": part["id"],
                "type": "function",
                "function": {"name": function["name"], "arguments": function["arguments"]},
            }
            calls.append(whole)
        else:
            calls[part["index"]]["function"]["arguments"] += function["arguments"]


def _first_part(index: int, name: str, arguments: str) -> ToolCallDelta:
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


class _NamedCall:
    """The one call of a named function: all text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._space = ""
        self.complete = 0

    def push(self, text: str) -> list[ToolCallDelta]:
        if self.complete:
            return [{"index": 0, "function": {"arguments": text}}] if text else []
        self._space += text
        if not self._space.strip():
            return []
        self.complete = 1
        return [_first_part(0, self._name, self._space)]


class _CallsInArray:
    """The calls of ``[{"name": …, "parameters": …}, …]``. The parameters are any JSON value."""

    def __init__(self) -> None:
        self.complete = 0
        self._rest = ""
        """Text that belongs to no part yet."""
        self._reads_arguments = self._in_scalar = False
        self._depth = 0
        """Number of open braces and brackets in the arguments that are being read."""
        self._in_string = self._escaped = self._closes = False

    def push(self, text: str) -> list[ToolCallDelta]:
        self._rest += text
        parts: list[ToolCallDelta] = []
        while True:
            if self._reads_arguments:
                if arguments := self._arguments():
                    parts.append({"index": self.complete, "function": {"arguments": arguments}})
                if self._reads_arguments:
                    return parts
            elif self._closes and (tail := _TAIL.match(self._rest)):
                self._rest = self._rest[tail.end() :]
                self._closes = False
                self.complete += 1
            elif not self._closes and (head := _HEAD.match(self._rest)) and (name := _name(head[1])) is not None:
                self._rest = self._rest[head.end() :]
                self._reads_arguments = True
                self._in_scalar = self._rest[0] not in '{["'
                parts.append(_first_part(self.complete, name, self._arguments()))
            else:
                return parts

    def _arguments(self) -> str:
        """Take the arguments, as far as they have come, from the text."""
        end = self._end_of_scalar() if self._in_scalar else self._end_of_nested()
        self._closes = end is not None
        self._reads_arguments = end is None
        taken, self._rest = self._rest[:end], "" if end is None else self._rest[end:]
        return taken

    def _end_of_scalar(self) -> int | None:
        """Return the end of a number or literal; None if it has not come."""
        scalar = _SCALAR.match(self._rest)
        assert scalar is not None
        return scalar.end() if scalar.end() < len(self._rest) else None

    def _end_of_nested(self) -> int | None:
        """Return the end of an object, array or string; None if it has not come."""
        for at, one in enumerate(self._rest):
            if self._in_string:
                self._in_string = self._escaped or one != '"'
                self._escaped = one == "\\" and not self._escaped
            elif one == '"':
                self._in_string = True
            elif one in "{}[]":
                self._depth += 1 if one in "{[" else -1
            if not self._depth and not self._in_string:
                return at + 1
        return None


def _name(written: str) -> str | None:
    """Return the name that a JSON string holds; None if it is not valid JSON."""
    try:
        return str(strict_json.loads(written))
    except ValueError:
        return None
