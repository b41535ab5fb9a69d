"""Conversion of arguments that a model wrote as bare text, by their schema."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Final

from pydantic import JsonValue

from drivetrain.tool_calls import strict_json
from drivetrain.tool_calls.schemas import TYPES, Accepted, same, type_of

_PYTHON: Final[dict[str, JsonValue]] = {"True": True, "False": False, "None": None}
_NOT_FINITE: Final = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[-+]?[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?")


class NoValueError(ValueError):
    """The text stands for a value that JSON cannot represent."""


def read_value(text: str, accepted: Accepted | None) -> JsonValue:
    """Convert a text to the value that its schema accepts.

    A text that fits no accepted type is returned unchanged: the code that runs the call can report it better.

    Args:
        text: The model's text.
        accepted: Values that the schema accepts; None if it does not know the argument, which then stays a string.

    Raises:
        NoValueError: The schema wants a number, and the text is one that JSON cannot hold (NaN, 1e400).
    """
    if accepted is None:
        return text
    stripped = text.strip()
    for constant in accepted.constants or ():
        if isinstance(constant, str) and constant in (text, stripped):
            return constant
    if accepted.types == {"string"}:
        return text
    try:
        value = _literal(stripped, python=accepted.types != TYPES)
    except ValueError:
        pass
    else:
        if accepted.constants is not None:
            for constant in accepted.constants:
                if same(constant, value):
                    return constant
        elif isinstance(value, str) and accepted.types != TYPES:
            return text  # its quotes are part of the text
        elif value is None:
            if "null" in accepted.types:
                return None
        elif (fitting := _fitting(value, accepted.types)) is not None:
            return fitting
    if "string" not in accepted.types and accepted.types & {"integer", "number"} and _is_no_json_number(stripped):
        raise NoValueError(f"{stripped[:20]} is no number of JSON")
    return text


def _fitting(value: JsonValue, types: frozenset[str]) -> JsonValue:
    """Return the value converted to one of these types; None if no type fits."""
    kind = type_of(value)
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    return None


def _literal(text: str, *, python: bool) -> JsonValue:
    """Parse a JSON text, or with ``python`` also a Python literal."""
    if python and text in _PYTHON:
        return _PYTHON[text]
    try:
        return strict_json.loads(text)
    except ValueError:
        if not python or not text.startswith(("[", "{", "(")):
            raise
    return python_literal(text)


def python_literal(text: str) -> JsonValue:
    """Parse a Python literal to a JSON value; nothing is evaluated.

    Raises:
        ValueError: The text is not such a literal.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about needless escapes in the model's text
            return of_python(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python literal: {error}") from None


def of_python(node: ast.expr) -> JsonValue:
    """Convert a parsed literal to a JSON value. JSON's names true, false and null are understood too.

    Raises:
        ValueError: The node is not a literal, or JSON cannot hold its value.
        TypeError: The node is not a valid literal, such as an unhashable key.
        RecursionError: The literal is nested too deeply.
    """
    return strict_json.loads(strict_json.dumps(ast.literal_eval(_JsonNames().visit(node))))


class _JsonNames(ast.NodeTransformer):
    """Replaces the names true, false and null by Python's constants."""

    _VALUES: Final = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _is_no_json_number(text: str) -> bool:
    if _NOT_FINITE.fullmatch(text):
        return True
    return any(map(str.isdigit, text)) and _NUMBER.fullmatch(text) is not None and not math.isfinite(float(text))
