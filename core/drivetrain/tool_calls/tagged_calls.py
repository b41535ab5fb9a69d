"""Calls with one tag per argument around bare text, which the schema gives a type."""

from __future__ import annotations

import re
from typing import Final

from pydantic import JsonValue

from drivetrain.tool_calls import strict_json
from drivetrain.tool_calls.functions import Block, Functions
from drivetrain.tool_calls.json_calls import after, after_space
from drivetrain.tool_calls.schemas import Parameters
from drivetrain.tool_calls.values import NoValueError, read_value

_Arguments = dict[str, JsonValue]
_MOST_ENDINGS: Final = 64
"""Maximum number of closing tags inside a value that are skipped."""


class Tagged:
    """Reads calls in one tag syntax.

    A value may contain its own closing tag. Its end is the first closing tag that is followed by another argument, the
    end of the call, or the end of the text.
    """

    def __init__(self, parameter: str, parameter_end: str, function_end: str, ending: str = "") -> None:
        """All arguments but ``parameter_end`` are regular expressions.

        Args:
            parameter: The opening tag of an argument, with a group ``key``, and optionally a group ``text`` that is
                "true" if the value is a string.
            parameter_end: The closing tag of an argument.
            function_end: The closing tag of a call.
            ending: The closing tag of the optional wrapper around calls.
        """
        self._parameter = re.compile(parameter)
        self._next = re.compile(rf"\s*+{parameter}")
        self._parameter_end = parameter_end
        self._function_end = re.compile(rf"\s*+{function_end}")
        self._ending = re.compile(rf"\s*+(?:{ending})")
        self._follows = re.compile(rf"\s*+(?:{_unnamed(parameter)}|{function_end}|{ending or function_end}|\Z)")

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that begins at ``opening``; None if it does not hold calls to known functions."""
        name, at = opening["name"], opening.end()
        if name not in functions:
            return None
        if opening[0].endswith("/>"):
            return Block([(name, {})], after(self._ending, text, at))
        body = _json_body(text, at)
        try:
            arguments, at = body or self._arguments(functions[name], text, at)
        except NoValueError:
            return None
        closing = self._function_end.match(text, at)
        end = after(self._ending, text, closing.end() if closing else at)
        if closing is None:
            # The closing tag may be missing at the end of the text, if no required argument is missing.
            complete = body or (arguments and functions[name].required <= arguments.keys())
            if not complete or text[end:].strip():
                return None
        return Block([(name, arguments)], end)

    def _arguments(self, parameters: Parameters, text: str, at: int) -> tuple[_Arguments, int]:
        arguments: _Arguments = {}
        while (opening := self._next.match(text, at)) is not None:
            value, at = self._text(parameters, text, opening.end())
            key = opening["key"].strip()
            value = value.removeprefix("\n").removesuffix("\n")
            is_text = opening.groupdict().get("text") == "true"
            arguments[key] = value if is_text else read_value(value, parameters.accepted(key))
        return arguments, at

    def _text(self, parameters: Parameters, text: str, start: int) -> tuple[str, int]:
        """Return the text of the value that begins at ``start``, and the end offset of its closing tag."""
        at = start
        for _ in range(_MOST_ENDINGS):
            if (end := text.find(self._parameter_end, at)) < 0:
                break
            at = end + len(self._parameter_end)
            if self._follows.match(text, at):
                return self._checked(parameters, text[start:end]), at
        raise NoValueError("the value does not end")

    def _checked(self, parameters: Parameters, value: str) -> str:
        if any(inner["key"].strip() in parameters for inner in self._parameter.finditer(value)):
            raise NoValueError("another argument begins within the value")
        return value


def _json_body(text: str, at: int) -> tuple[_Arguments, int] | None:
    """Return arguments that the model wrote as JSON instead of tags, and their end offset."""
    start = after_space(text, at)
    if not text.startswith("{", start):
        return None
    try:
        value, end = strict_json.decode_at(text, start)
    except ValueError:
        return None
    return (value, end) if isinstance(value, dict) else None


def _unnamed(pattern: str) -> str:
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)
