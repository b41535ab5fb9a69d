"""Tool calls in a model's text: which functions it calls, with which arguments.

Models write them in the syntax that they were trained on, so all of these are read wherever they stand:

- JSON: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or ``[TOOL_CALLS] [{…}, …]``
- XML: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, or
  ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``
- functions: ``<function=NAME>{…}</function>``

and these where they are the whole text: JSON as above (``parameters`` will do for ``arguments``), and Python calls,
``[NAME(KEY=VALUE, …), …]``.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from pydantic import JsonValue

from drivetrain.openai_api.responses import FunctionCall


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A text, its calls taken out."""

    content: str | None
    """What is left of it; None if nothing is."""
    calls: tuple[FunctionCall, ...]


_Calls = list[tuple[str, dict[str, JsonValue]]]
# A text may be anything, such as ten thousand spaces: where a pattern could match in several ways it is possessive (*+,
# ++), and what is long is found with str.find, so that the time does not grow with the square of the length.
_OPENING: Final = re.compile(r"<tool_call>\s*+|\[TOOL_CALLS\]\s*+|(?=<function=)")
_WRAPPER_END: Final = re.compile(r"\s*+</tool_call>")
_FUNCTION: Final = re.compile(r"<function=([^<>\s]++)>\s*+")
_FUNCTION_END: Final = re.compile(r"\s*+</function>")
_PARAMETER: Final = re.compile(r"\s*+<parameter=([^<>\s]++)>")
_NAME: Final = re.compile(r"([^\s<{\[]++)\s*+(?=<arg_key>|</tool_call>)")
_PAIR: Final = re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
_PYTHON: Final = re.compile(r"\[?\s*[\w.]+\(.*\)\s*\]?", re.DOTALL)
_MARKER: Final = "<|python_tag|>"


def parse_tool_calls(text: str, tools: Iterable[Mapping[str, JsonValue]]) -> ParsedText:
    """Find the calls in a text, in order.

    A call to a function that is not among ``tools``, and one whose arguments cannot be read, is no call: its text is
    content like any other.

    Args:
        text: What the model wrote.
        tools: The functions it was shown, as the OpenAI API describes them.
    """
    reader = _Reader(tools)
    calls: _Calls = []
    content: list[str] = []
    kept_to = at = 0
    while (opening := _OPENING.search(text, at)) is not None:
        found = reader.block(text, opening)
        if found is None:
            at = max(opening.end(), opening.start() + 1)
            continue
        calls += found[0]
        content.append(text[kept_to : opening.start()])
        kept_to = at = found[1]
    if calls:
        rest = "".join([*content, text[kept_to:]]).strip()
    elif calls := reader.whole(text.strip().removeprefix(_MARKER)):
        rest = ""
    else:
        rest = text
    return ParsedText(
        content=rest or None,
        calls=tuple({"name": name, "arguments": json.dumps(given)} for name, given in calls),
    )


class _Reader:
    """Reads calls to known functions."""

    def __init__(self, tools: Iterable[Mapping[str, JsonValue]]) -> None:
        self._schemas: dict[str, Mapping[str, JsonValue]] = {}
        for tool in tools:
            match tool.get("function"):
                case {"name": str(name), **rest}:
                    parameters = rest.get("parameters")
                    properties = parameters.get("properties") if isinstance(parameters, dict) else None
                    self._schemas[name] = properties if isinstance(properties, dict) else {}

    def block(self, text: str, opening: re.Match[str]) -> tuple[_Calls, int] | None:
        """Return the calls that an opening tag begins, and where their text ends."""
        at = opening.end()
        found = self._json(text, at) or self._function(text, at) or self._pairs(text, at)
        if found is None or not (known := [call for call in found[0] if call[0] in self._schemas]):
            return None
        end = _WRAPPER_END.match(text, found[1]) if opening[0] else None
        return known, end.end() if end else found[1]

    def whole(self, text: str) -> _Calls:
        """Return the calls of a text that is nothing else."""
        found = self._json(text, 0)
        if found is not None:
            calls = found[0] if found[1] == len(text) else []
        else:
            calls = _python(text)
        return [call for call in calls if call[0] in self._schemas]

    def _json(self, text: str, at: int) -> tuple[_Calls, int] | None:
        value, end = _decoded(text, at)
        calls = [_as_call(item) for item in (value if isinstance(value, list) else [value])]
        known = [call for call in calls if call is not None]
        return (known, end) if known and len(known) == len(calls) else None

    def _function(self, text: str, at: int) -> tuple[_Calls, int] | None:
        if (opening := _FUNCTION.match(text, at)) is None:
            return None
        name, at = opening[1], opening.end()
        if text.startswith("{", at):
            arguments, at = _decoded(text, at)
        else:
            arguments, at = self._parameters(name, text, at, _PARAMETER, "</parameter>")
        end = _FUNCTION_END.match(text, at)
        return ([(name, arguments)], end.end()) if end and isinstance(arguments, dict) else None

    def _pairs(self, text: str, at: int) -> tuple[_Calls, int] | None:
        if (opening := _NAME.match(text, at)) is None:
            return None
        arguments, at = self._parameters(opening[1], text, opening.end(), _PAIR, "</arg_value>")
        return ([(opening[1], arguments)], at) if _WRAPPER_END.match(text, at) else None

    def _parameters(
        self, name: str, text: str, at: int, opening: re.Pattern[str], closing: str
    ) -> tuple[dict[str, JsonValue], int]:
        arguments: dict[str, JsonValue] = {}
        while (found := opening.match(text, at)) and (end := text.find(closing, found.end())) >= 0:
            key = found[1].strip()
            value = text[found.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = self._value(name, key, value)
            at = end + len(closing)
        return arguments, at

    def _value(self, name: str, key: str, text: str) -> JsonValue:
        """XML has text only: what the schema calls anything else is read as JSON if it is JSON."""
        schema = self._schemas.get(name, {}).get(key)
        if not isinstance(schema, dict) or schema.get("type") == "string":
            return text
        stripped = text.strip()
        value, end = _decoded(stripped, 0)
        return value if end == len(stripped) and end else text


def _as_call(value: JsonValue) -> tuple[str, dict[str, JsonValue]] | None:
    match value:
        case {"name": str(name), **rest}:
            arguments = rest.get("arguments", rest.get("parameters", {}))
            if isinstance(arguments, str):
                arguments, _ = _decoded(arguments, 0)
            return (name, arguments) if isinstance(arguments, dict) else None
    return None


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder: Final = json.JSONDecoder(parse_constant=_no_json)


def _decoded(text: str, at: int) -> tuple[JsonValue, int]:
    """Return the JSON value that begins at ``at`` and where it ends; None and ``at`` if there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _python(text: str) -> _Calls:
    """Python calls with literal keyword arguments; nothing is evaluated."""
    if not _PYTHON.fullmatch(text):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a model may have escaped without need
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls: _Calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
                return []
            given = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            calls.append((ast.unparse(node.func), json.loads(json.dumps(given, allow_nan=False))))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls
