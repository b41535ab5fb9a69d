"""Checks of names, numbers of seconds, paths and token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NoReturn

from drivetrain.checks.limits import MOST_DECODED
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest

LONGEST_NAME: Final = 512
"""Characters of a name: engines use names in paths and in log lines."""
LONGEST_REQUEST_ID: Final = LONGEST_NAME - 12
"""Leaves room for the number of a prompt and of a sample: ``ID-3/7``."""
LONGEST_SECONDS: Final = 10.0**9
"""Thirty years; event loops cannot wait for arbitrarily large numbers."""


def check_name(field: str, value: object, longest: int = LONGEST_NAME) -> str:
    """Return a name: text that is not empty, that every encoding holds, and that has at most ``longest`` characters.

    Raises:
        InvalidRequest: it is none.
    """
    if fault := fault_of_name(value, longest):
        refuse(field, value, fault)
    assert isinstance(value, str)
    return str(value)


def fault_of_name(value: object, longest: int = LONGEST_NAME) -> str:
    """Return why a value is no name, and what was expected; "" if it is one."""
    if type(value) is str and 0 < len(value) <= longest and value.isprintable():
        return ""  # surrogates and NUL are not printable
    if not isinstance(value, str) or not value:
        return "expected a string that is not empty"
    if len(value) > longest:
        return f"it has {len(value)} characters; expected at most {longest}"
    if "\0" in value or has_surrogate(value):
        return "expected Unicode text without NUL characters and without halves of surrogate pairs"
    return ""


def check_seconds(field: str, value: object) -> float:
    """Return a number of seconds above 0.

    Raises:
        InvalidRequest: it is none, or not finite, or longer than an event loop can wait.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_SECONDS:
        refuse(field, value, f"expected a number of seconds above 0 and at most {LONGEST_SECONDS:g}")
    return value


def check_path(field: str, value: object) -> str:
    """Return a path as text.

    Raises:
        InvalidRequest: it is no path, or one that no file can have.
    """
    if not isinstance(value, str | os.PathLike):
        refuse(field, value, "expected a path: a string or a pathlib.Path")
    text = os.fspath(value)
    if not isinstance(text, str) or not text:
        refuse(field, value, "expected the path of a folder, as text")
    if "\0" in text or has_surrogate(text):
        refuse(field, value, "expected a path without NUL characters, as Unicode text")
    return text


def has_surrogate(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which no encoding can write."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def refuse(field: str, value: object, expected: str) -> NoReturn:
    """Raise :class:`InvalidRequest`, with the field, its value and what was expected."""
    raise InvalidRequest(f"{field}={shown(value)}: {expected}", field=field)


def check_token_ids(field: str, value: object) -> object:
    """Return a sequence of token ids.

    Raises:
        InvalidRequest: it is none.
    """
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        refuse(field, value, f"it is a {type(value).__name__}; expected a list of token ids")
    if len(value) > MOST_DECODED:
        refuse(field, value, f"it has {len(value)} entries; expected at most {MOST_DECODED} token ids")
    for token_id in value:
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            refuse(field, token_id, "it is no token id; expected integers of at least 0, within 32 bits")
    return value


def check_sequences(field: str, value: object) -> object:
    """Return a sequence of sequences, whose items are left to the prompts' own checks.

    Raises:
        InvalidRequest: it is none.
    """
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        refuse(field, value, f"it is a {type(value).__name__}; expected a list of lists of token ids")
    for index, item in enumerate(value):
        if isinstance(item, str | bytes | bytearray) or not isinstance(item, Sequence):
            refuse(f"{field}[{index}]", item, f"it is a {type(item).__name__}; expected a list of token ids")
    return value
