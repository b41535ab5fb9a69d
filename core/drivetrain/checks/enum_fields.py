"""Enum fields of pydantic models."""

from __future__ import annotations

from enum import Enum
from typing import Final

from pydantic import BeforeValidator


def _text_or_member(value: object) -> object:
    """Refuse other types here: Python's enums would call the value's ``repr`` for their error, which may raise."""
    if not isinstance(value, str | Enum):
        raise ValueError(f"it is a {type(value).__name__}; expected a string")
    return value


BY_NAME: Final = BeforeValidator(_text_or_member)
"""Annotation of a field that accepts an enum member or its value: ``Annotated[Colour, BY_NAME]``."""
