"""Reasoning sections of a text; calls inside them are not made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_TAGS: Final = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "◁think▷": "◁/think▷"}
_EITHER: Final = re.compile("|".join(map(re.escape, [*_TAGS, *_TAGS.values()])))
_ENDINGS: Final = re.compile("|".join(map(re.escape, _TAGS.values())))


def tags(text: str) -> Iterator[re.Match[str]]:
    """Iterate over the opening and closing reasoning tags of a text, in order."""
    return _EITHER.finditer(text)


def ending_after(text: str, at: int) -> int:
    """Return the end offset of the first closing tag at or after ``at``; -1 if there is none."""
    found = _ENDINGS.search(text, at)
    return found.end() if found else -1


def last_ending(text: str) -> int:
    """Return the start offset of the last closing tag; -1 if there is none."""
    return max(text.rfind(tag) for tag in _TAGS.values())


def begins(tag: str) -> bool:
    """Return True for an opening tag, False for a closing one."""
    return tag in _TAGS


def is_open(prompt: str) -> bool:
    """Return True if a prompt ends with an opening reasoning tag, as reasoning models' chat templates write it."""
    end = prompt.rstrip()
    return any(end.endswith(tag) for tag in _TAGS)
