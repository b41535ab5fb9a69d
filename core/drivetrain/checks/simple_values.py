"""Checks of names, durations, paths and token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NoReturn

from drivetrain.checks.limits import MOST_DECODED
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest

LONGEST_NAME: Final = 512
"""Maximum characters of a name; engines use names in paths and log lines."""
LONGEST_PATH: Final = 4096
"""Maximum characters of a path, as Linux has it, and of any other text of a configuration."""
LONGEST_REQUEST_ID: Final = LONGEST_NAME - 12
"""Maximum characters of a request id; leaves room for prompt and sample numbers, as in ``ID-3/7``."""
LONGEST_SECONDS: Final = 10.0**9
"""Maximum seconds, thirty years; event loops cannot wait for arbitrarily large numbers."""


def check_name(field: str, value: object, longest: int = LONGEST_NAME) -> str:
    """Return a valid name: non-empty printable text of at most ``longest`` characters, without surrogates.

    Raises:
        InvalidRequest: The value is not a valid name.
    """
    if fault := fault_of_name(value, longest):
        refuse(field, value, fault)
    assert isinstance(value, str)
    return str(value)


def fault_of_name(value: object, longest: int = LONGEST_NAME) -> str:
    """Return the fault of a name, with the expectation; "" if it is valid."""
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
    """Return a positive number of seconds.

    Raises:
        InvalidRequest: The value is not a number, not positive, not finite, or longer than an event loop can wait.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_SECONDS:
        refuse(field, value, f"expected a number of seconds above 0 and at most {LONGEST_SECONDS:g}")
    return value


def check_path(field: str, value: object) -> str:
    """Return a path as text.

    Raises:
        InvalidRequest: The value is not a path, or no file can have such a path.
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
    """Return True if a text holds half of a surrogate pair, which no encoding can represent."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def refuse(field: str, value: object, expected: str) -> NoReturn:
    """Raise :class:`InvalidRequest` with the field, its value and what was expected."""
    raise InvalidRequest(f"{field}={shown(value)}: {expected}", field=field)


def check_token_ids(field: str, value: object) -> object:
    """Return a valid sequence of token ids.

    Raises:
        InvalidRequest: The value is not a list of integers in range, or too long.
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
    """Return a sequence of sequences; their items are checked with the prompts.

    Raises:
        InvalidRequest: The value is not a list of lists.
    """
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        refuse(field, value, f"it is a {type(value).__name__}; expected a list of lists of token ids")
    for index, item in enumerate(value):
        if isinstance(item, str | bytes | bytearray) or not isinstance(item, Sequence):
            refuse(f"{field}[{index}]", item, f"it is a {type(item).__name__}; expected a list of token ids")
    return value
