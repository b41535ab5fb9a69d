"""Values of arguments that a model wrote as bare text: the schema decides what they are."""

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
    """The text is nothing that JSON can hold."""


def read_value(text: str, accepted: Accepted | None) -> JsonValue:
    """Return the value that a text stands for.

    A text that is nothing that the schema accepts comes back as it is: whoever runs the call can say so better.

    Args:
        text: What the model wrote.
        accepted: What the schema accepts; None if it knows no such argument, which then is a string.

    Raises:
        NoValueError: a number was wanted, and JSON has none such (NaN, 1e400).
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
            return text  # its quotes are a part of it
        elif value is None:
            if "null" in accepted.types:
                return None
        elif (fitting := _fitting(value, accepted.types)) is not None:
            return fitting
    if "string" not in accepted.types and accepted.types & {"integer", "number"} and _is_no_json_number(stripped):
        raise NoValueError(f"{stripped[:20]} is no number of JSON")
    return text


def _fitting(value: JsonValue, types: frozenset[str]) -> JsonValue:
    """The value, as one of these types; None if it is of none of them."""
    kind = type_of(value)
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    return None


def _literal(text: str, *, python: bool) -> JsonValue:
    """The value of a JSON text, or of a Python literal."""
    if python and text in _PYTHON:
        return _PYTHON[text]
    try:
        return strict_json.loads(text)
    except ValueError:
        if not python or not text.startswith(("[", "{", "(")):
            raise
    return python_literal(text)


def python_literal(text: str) -> JsonValue:
    """Return the value of a Python literal that JSON can hold too; nothing is evaluated.

    Raises:
        ValueError: it is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a model may have escaped without need
            return of_python(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python literal: {error}") from None


def of_python(node: ast.expr) -> JsonValue:
    """Return the value of a parsed literal, in which JSON's own names will do.

    Raises:
        ValueError: it is none, or JSON cannot hold it.
        TypeError: likewise.
        RecursionError: it is nested too deeply.
    """
    return strict_json.loads(strict_json.dumps(ast.literal_eval(_JsonNames().visit(node))))


class _JsonNames(ast.NodeTransformer):
    """Reads true, false and null as Python's own."""

    _VALUES: Final = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _is_no_json_number(text: str) -> bool:
    if _NOT_FINITE.fullmatch(text):
        return True
    return any(map(str.isdigit, text)) and _NUMBER.fullmatch(text) is not None and not math.isfinite(float(text))
