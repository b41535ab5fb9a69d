"""The functions that a model was shown, and calls to them as the parsers find them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from pydantic import JsonValue

from drivetrain.tool_calls import strict_json
from drivetrain.tool_calls.schemas import Parameters


class FunctionCall(TypedDict):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


Call = tuple[str, dict[str, JsonValue]]
"""Name and arguments."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of text that is calls."""

    calls: list[Call]
    end: int
    """Where it ends."""


class Functions:
    """Functions by name, as the OpenAI API describes them."""

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
    """Return arguments as an object; null and "" are none, a text is JSON. None if it is no object.

    Args:
        value: What a model or a client of the API wrote as arguments.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = strict_json.loads(value)
        except ValueError:
            return None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}
    return value if isinstance(value, dict) else None
