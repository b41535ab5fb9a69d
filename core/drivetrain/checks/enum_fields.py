"""Enums as fields of pydantic models."""

from __future__ import annotations

from enum import Enum
from typing import Final

from pydantic import BeforeValidator


def _text_or_member(value: object) -> object:
    """Python's enums put the ``repr`` of any other value into their error, which may raise whatever it likes."""
    if not isinstance(value, str | Enum):
        raise ValueError(f"it is a {type(value).__name__}; expected a string")
    return value


BY_NAME: Final = BeforeValidator(_text_or_member)
"""Annotates a field that takes a member of an enum or the text of one: ``Annotated[Colour, BY_NAME]``."""
