"""Calls with JSON arguments: an object that includes the name, or a name in a tag before the arguments."""

from __future__ import annotations

import re
from typing import Final

from pydantic import JsonValue

from drivetrain.tool_calls import strict_json
from drivetrain.tool_calls.functions import Block, Call, Functions, as_arguments

_SPACE: Final = re.compile(r"\s*+")


class NamedWithin:
    """Reads ``{"name": …, "arguments": {…}}``, or a list of such objects, between an opening and an ending tag."""

    def __init__(self, ending: str = "") -> None:
        self._ending = re.compile(rf"\s*+(?:{ending})")

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that begins at ``opening``; None if it does not hold calls to known functions."""
        try:
            value, end = strict_json.decode_at(text, after_space(text, opening.end()))
        except ValueError:
            return None
        calls = known_calls(functions, value)
        return Block(calls, after(self._ending, text, end)) if calls else None


class NamedBefore:
    """Reads ``NAME … {…}``: the opening's group ``name`` is the function, followed by its arguments."""

    def __init__(self, ending: str = "") -> None:
        self._ending = re.compile(rf"\s*+(?:{ending})")

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that begins at ``opening``; None if it does not hold calls to known functions."""
        name = opening["name"]
        if name not in functions:
            return None
        try:
            value, end = strict_json.decode_at(text, after_space(text, opening.end()))
        except ValueError:
            return None
        arguments = as_arguments(value)
        return None if arguments is None else Block([(name, arguments)], after(self._ending, text, end))


class EitherWay:
    """Reads as :class:`NamedBefore` if the opening contains a name, else as :class:`NamedWithin`."""

    def __init__(self) -> None:
        self._before, self._within = NamedBefore(), NamedWithin()

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that begins at ``opening``; None if it does not hold calls to known functions."""
        return (self._before if opening["name"] else self._within)(functions, text, opening)


def whole_json(functions: Functions, text: str) -> list[Call]:
    """Return the calls of a text that is only JSON objects, separated by semicolons, or a list of them; else []."""
    calls: list[Call] = []
    at, end = 0, -1
    while end < len(text):
        try:
            value, end = strict_json.decode_at(text, after_space(text, at))
        except ValueError:
            return []
        found = known_calls(functions, value)
        end = after_space(text, end)
        if not found or (end < len(text) and text[end] != ";"):
            return []
        calls += found
        at = end + 1
    return calls


def known_calls(functions: Functions, value: JsonValue) -> list[Call]:
    """Return the calls to known functions in a JSON value; [] if any part of it is not a call."""
    calls: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(item, dict) or not isinstance(name, str):
            return []
        arguments = as_arguments(item.get("arguments", item.get("parameters", {})))
        if arguments is None:
            return []
        if name in functions:
            calls.append((name, arguments))
    return calls


def after(ending: re.Pattern[str], text: str, end: int) -> int:
    """Return the offset of a block's end, after its closing tags if there are any."""
    found = ending.match(text, end)
    return found.end() if found else end


def after_space(text: str, at: int) -> int:
    """Return the offset after the whitespace that begins at ``at``."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
