"""Standard JSON: no NaN, no Infinity, and no number that overflows to an infinite float."""

from __future__ import annotations

import json
import math
from typing import Final, NoReturn

from pydantic import JsonValue


def loads(text: str) -> JsonValue:
    """Parse a JSON text.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    stripped = text.strip()
    value, end = decode_at(stripped, 0)
    if end < len(stripped):
        raise ValueError(f"there is more after the value, at character {end}")
    return value


def decode_at(text: str, at: int) -> tuple[JsonValue, int]:
    """Parse the JSON value that begins at ``at``; return it and the offset of its end.

    Raises:
        ValueError: No JSON value begins there, or it is nested too deeply.
    """
    try:
        return _decoder.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: JsonValue) -> str:
    """Return a value as JSON text.

    Raises:
        ValueError: JSON cannot represent the value.
    """
    return json.dumps(value, allow_nan=False)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is more than a float can hold")
    return number


_decoder: Final = json.JSONDecoder(parse_constant=_no_json, parse_float=_finite)
