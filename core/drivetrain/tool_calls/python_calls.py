"""Calls in Python syntax, with literal keyword arguments; nothing is evaluated."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

from drivetrain.tool_calls.functions import Block, Call, Functions
from drivetrain.tool_calls.json_calls import whole_json
from drivetrain.tool_calls.values import of_python

_CALLS: Final = re.compile(r"\[?\s*[\w.]+\(.*\)\s*\]?", re.DOTALL)
_MOST_ENDINGS: Final = 16
"""Maximum number of ending tags inside the arguments that are skipped."""


class Enclosed:
    """Reads Python or JSON calls between an opening and an ending tag."""

    def __init__(self, ending: str) -> None:
        self._ending = ending

    def __call__(self, functions: Functions, text: str, opening: re.Match[str]) -> Block | None:
        """Read the block that begins at ``opening``; None if it does not hold calls to known functions."""
        end = opening.end()
        for _ in range(_MOST_ENDINGS):
            stop = text.find(self._ending, end)
            inner = text[opening.end() : stop if stop >= 0 else len(text)].strip()
            end = stop + len(self._ending) if stop >= 0 else len(text)
            if calls := whole_json(functions, inner) or whole_python(functions, inner):
                return Block(calls, end)
            if stop < 0:
                return None
        return None


def whole_python(functions: Functions, text: str) -> list[Call]:
    """Return the calls of a text that is only Python calls, in a list or one per line; else []."""
    if not _CALLS.fullmatch(text):
        return []
    calls: list[Call] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about needless escapes in the model's text
            body = ast.parse(text).body
        for statement in body:
            if not isinstance(statement, ast.Expr):
                return []
            nodes = statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
            for node in nodes:
                if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
                    return []
                given = {str(word.arg): of_python(word.value) for word in node.keywords}
                calls.append((ast.unparse(node.func), given))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return [call for call in calls if call[0] in functions]
