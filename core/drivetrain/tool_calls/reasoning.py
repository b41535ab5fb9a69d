"""Where a text is reasoning, in which a call is only thought of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_TAGS: Final = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "◁think▷": "◁/think▷"}
_OPENINGS: Final = re.compile("|".join(map(re.escape, _TAGS)))
_EITHER: Final = re.compile("|".join(map(re.escape, [*_TAGS, *_TAGS.values()])))
_ENDINGS: Final = re.compile("|".join(map(re.escape, _TAGS.values())))


def tags(text: str) -> Iterator[re.Match[str]]:
    """Return the tags of a text that begin or end reasoning, in order."""
    return _EITHER.finditer(text)


def ending_after(text: str, at: int) -> int:
    """Return where the first tag after ``at`` that ends reasoning ends; -1 if there is none."""
    found = _ENDINGS.search(text, at)
    return found.end() if found else -1


def last_ending(text: str) -> int:
    """Return where the last tag that ends reasoning begins; -1 if there is none."""
    return max(text.rfind(tag) for tag in _TAGS.values())


def begins(tag: str) -> bool:
    """Whether a tag begins reasoning, and does not end it."""
    return tag in _TAGS


def is_open(prompt: str) -> bool:
    """Whether a prompt ends within reasoning that it has begun, as chat templates of reasoning models write it."""
    end = prompt.rstrip()
    return any(end.endswith(tag) for tag in _TAGS)
