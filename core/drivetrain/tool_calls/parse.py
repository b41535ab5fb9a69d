"""Extraction of tool calls from a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from drivetrain.tool_calls import reasoning, strict_json
from drivetrain.tool_calls.dialects import ALL, Dialect
from drivetrain.tool_calls.functions import Block, Call, FunctionCall, Functions
from drivetrain.tool_calls.json_calls import after_space

_MOST_OPENINGS: Final = 128
"""Maximum number of blocks tried per syntax: each failed try may read to the text's end."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A text split into its content and its calls."""

    content: str | None
    """The text without calls; None if nothing remains."""
    calls: tuple[FunctionCall, ...]


def parse_tool_calls(
    text: str,
    tools: Iterable[Mapping[str, JsonValue]],
    *,
    dialects: Sequence[Dialect] = ALL,
    within_reasoning: bool = False,
) -> ParsedText:
    """Find the calls in a text, in order.

    Text stays content if it calls a function that is not in ``tools``, has unreadable arguments, or lies within
    reasoning (``<think>…</think>``).

    Args:
        text: The model's output.
        tools: The functions the model was shown, in the OpenAI API's format.
        dialects: Syntaxes to look for; see :func:`dialects_for`.
        within_reasoning: True if the prompt has already opened the reasoning.
    """
    functions = Functions(tools)
    start = max(0, reasoning.ending_after(text, 0)) if within_reasoning else 0
    if within_reasoning and not start:
        return ParsedText(text or None, ())
    start, found = _blocks(text, start, functions, dialects)
    if found:
        calls = [call for _, block in found for call in block.calls]
        kept_to, content = 0, []
        for begin, block in found:
            content.append(text[kept_to:begin])
            kept_to = block.end
        rest = "".join([*content, text[kept_to:]]).strip()
    elif calls := _whole(text[start:].strip(), functions, dialects):
        rest = text[:start].strip()
    else:
        rest = text
    return ParsedText(
        content=rest or None,
        calls=tuple({"name": name, "arguments": strict_json.dumps(given)} for name, given in calls),
    )


def _blocks(
    text: str, start: int, functions: Functions, dialects: Sequence[Dialect]
) -> tuple[int, list[tuple[int, Block]]]:
    """Return the offset where the text after reasoning begins, and each block of calls with its offset."""
    openings = [_Openings(dialect, text) for dialect in dialects if dialect.opening is not None]
    tags = reasoning.tags(text)
    tag = next(tags, None)
    last_ending = reasoning.last_ending(text)
    found: list[tuple[int, Block]] = []
    at = start
    while True:
        while tag is not None and tag.start() < at:
            tag = next(tags, None)
        nearest = min((one.next(at) for one in openings), default=len(text))
        if tag is not None and tag.start() <= nearest:
            at = tag.end()
            if not reasoning.begins(tag[0]):
                # A closing tag without an opening one: everything before was reasoning.
                start, found = at, []
            elif at <= last_ending:
                at = reasoning.ending_after(text, at)
                start = start if found else at
            elif after_space(text, start) == tag.start():
                return len(text), []
            continue
        if nearest >= len(text):
            return start, found
        for one in openings:
            if one.next(at) == nearest and (block := one.read(functions)) is not None:
                found.append((nearest, block))
                at = block.end
                break
        else:
            at = nearest + 1


def _whole(text: str, functions: Functions, dialects: Sequence[Dialect]) -> list[Call]:
    if not text:
        return []
    ways = dict.fromkeys(dialect.whole for dialect in dialects if dialect.whole is not None)
    return next((calls for way in ways if (calls := way(functions, text))), [])


class _Openings:
    """Possible beginnings of one syntax's blocks in a text."""

    def __init__(self, dialect: Dialect, text: str) -> None:
        assert dialect.opening is not None
        assert dialect.read is not None
        self._read = dialect.read
        self._text = text
        self._matches: Iterator[re.Match[str]] = dialect.opening.finditer(text)
        self._tried = 0
        self._match = next(self._matches, None)

    def next(self, at: int) -> int:
        """Return the offset of the next opening at or after ``at``; the text's length if there is none."""
        while self._match is not None and self._match.start() < at:
            self._match = next(self._matches, None)
        return self._match.start() if self._match is not None else len(self._text)

    def read(self, functions: Functions) -> Block | None:
        """Return the block at the current opening; None if it is not a block of known calls."""
        self._tried += 1
        if self._match is None or self._tried > _MOST_OPENINGS:
            return None
        return self._read(functions, self._text, self._match)
