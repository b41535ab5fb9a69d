"""JSON as its standard has it: no NaN, no Infinity, and no number that only an infinite float could hold."""

from __future__ import annotations

import json
import math
from typing import Final, NoReturn

from pydantic import JsonValue


def loads(text: str) -> JsonValue:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    stripped = text.strip()
    value, end = decode_at(stripped, 0)
    if end < len(stripped):
        raise ValueError(f"there is more after the value, at character {end}")
    return value


def decode_at(text: str, at: int) -> tuple[JsonValue, int]:
    """Return the JSON value that begins at ``at``, and where it ends.

    Raises:
        ValueError: none begins there, or it is nested too deeply.
    """
    try:
        return _decoder.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: JsonValue) -> str:
    """Return a value as JSON.

    Raises:
        ValueError: it holds what JSON cannot.
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
