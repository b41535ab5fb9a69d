"""The functions that a model may call, and parsed calls to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from typing_extensions import TypedDict  # pydantic makes schemas of no other before Python 3.12

from drivetrain.tool_calls import strict_json
from drivetrain.tool_calls.schemas import Parameters


class FunctionCall(TypedDict):
    """A call: function name, and arguments as JSON text."""

    name: str
    arguments: str


Call = tuple[str, dict[str, JsonValue]]
"""Function name and parsed arguments."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of one or more calls in a text."""

    calls: list[Call]
    end: int
    """Character offset of the block's end."""


class Functions:
    """Functions by name, from tools in the OpenAI API's format."""

    def __init__(self, tools: Iterable[Mapping[str, JsonValue]]) -> None:
        self._parameters: dict[str, Parameters] = {}
        for tool in tools:
            match tool.get("function"):
                case {"name": str(name), **rest}:
                    schema = rest.get("parameters")
                    self._parameters[name] = Parameters(schema if isinstance(schema, dict) else {})

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __getitem__(self, name: str) -> Parameters:
        return self._parameters[name]


def as_arguments(value: JsonValue) -> dict[str, JsonValue] | None:
    """Return a call's arguments as an object: null and "" are empty, text is parsed as JSON; None if not an object.

    Args:
        value: Arguments as a model or an API client wrote them.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = strict_json.loads(value)
        except ValueError:
            return None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}
    return value if isinstance(value, dict) else None
