"""Values formatted for error messages: short, and without secrets."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Final

_LONGEST: Final = 200
"""Maximum characters of a single value; the middle of a longer one is omitted."""
_SHORTEST_SECRET: Final = 6
"""Minimum characters of a secret that is searched for in a text."""
_SECRET_NAME: Final = re.compile(
    r"(?:api|auth|access|admin|private|secret)[_-]?key|secret|passw(?:or)?d|credential|authorization"
    r"|(?:^|[_-])(?:hf|hub|api|auth|access|admin|bearer)[_-]?token$|^token$",
    re.IGNORECASE,
)
HIDDEN: Final = "**********"
"""Placeholder for a secret."""


def is_secret(name: str) -> bool:
    """Return True if a field with this name holds a key, a password or another secret."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: object) -> object:
    """Return nested mappings and lists with secret values replaced by :data:`HIDDEN`."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(key, str) and is_secret(key) and item is not None else without_secrets(item)
            for key, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def secrets_in(value: object, *, secret: bool = False) -> Iterator[str]:
    """Yield the texts that are secret in nested mappings and lists, long enough to be told from other words."""
    match value:
        case str() if secret and len(value) >= _SHORTEST_SECRET:
            yield value
        case Mapping():
            for key, item in value.items():
                yield from secrets_in(item, secret=secret or (isinstance(key, str) and is_secret(key)))
        case list():
            for item in value:
                yield from secrets_in(item, secret=secret)


def shown(value: object) -> str:
    """Return the ``repr`` of a value, shortened, with secrets hidden; it never raises."""
    try:
        return _short.repr(value)
    except Exception:  # the value's own __repr__ may raise anything, and must not hide the error being reported
        return f"<{type(value).__name__}>"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST
        self.maxlong = 40
        self.maxdict = self.maxlist = self.maxtuple = 6
        self.maxlevel = 4
        self.fillvalue = "…"

    def repr_dict(self, x: Mapping[object, object], level: int) -> str:
        if level <= 0:
            return "{…}" if x else "{}"
        parts: list[str] = []
        for key, value in x.items():
            if len(parts) == self.maxdict:
                parts.append("…")
                break
            item = repr(HIDDEN) if isinstance(key, str) and is_secret(key) else self.repr1(value, level - 1)
            parts.append(f"{self.repr1(key, level - 1)}: {item}")
        return f"{{{', '.join(parts)}}}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= _LONGEST else f"<{len(x)} bytes>"

    repr_bytearray = repr_bytes

    def repr_int(self, x: int, level: int) -> str:
        return f"<an integer of {x.bit_length()} bits>" if x.bit_length() > 256 else repr(x)


_short: Final = _Short()
