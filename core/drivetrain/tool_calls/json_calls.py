"""Calls whose arguments are JSON: an object with the name in it, or a name in a tag before the arguments."""

from __future__ import annotations

import re
from typing import Final

from pydantic import JsonValue

from drivetrain.tool_calls import strict_json
from drivetrain.tool_calls.functions import Block, Call, Functions, as_arguments

_SPACE: Final = re.compile(r"\s*+")


class NamedWithin:
    """``{"name": …, "arguments": {…}}`` or a list of those, after an opening and before an ending."""

    def __init__(self, ending: str = "") -> None:
        self._ending = re.compile(rf"\s*+(?:{ending})")

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that ``opening`` begins; None if it is none."""
        try:
            value, end = strict_json.decode_at(text, after_space(text, opening.end()))
        except ValueError:
            return None
        calls = known_calls(functions, value)
        return Block(calls, after(self._ending, text, end)) if calls else None


class NamedBefore:
    """``NAME … {…}``: the opening's group says the name, and what follows are the arguments."""

    def __init__(self, ending: str = "") -> None:
        self._ending = re.compile(rf"\s*+(?:{ending})")

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that ``opening`` begins; None if it is none."""
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
    """Arguments after a name, where the opening has one; else objects with the name within."""

    def __init__(self, ending: str = "") -> None:
        self._before, self._within = NamedBefore(ending), NamedWithin(ending)

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that ``opening`` begins; None if it is none."""
        return (self._before if opening["name"] else self._within)(functions, text, opening)


def whole_json(functions: Functions, text: str) -> list[Call]:
    """Return the calls of a text that is nothing but JSON objects, separated by semicolons, or a list of them."""
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
    """Return the calls to known functions that a JSON value stands for; none if a part of it is no call."""
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
    """Return where a block ends, with its closing tags if they are there."""
    found = ending.match(text, end)
    return found.end() if found else end


def after_space(text: str, at: int) -> int:
    """Return where the whitespace that begins at ``at`` ends."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
