"""Answers of a server, and the fields of their JSON; a missing field or wrong type fails with its path."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class Field:
    """A value inside an answer and its path, such as ``choices.0.token_ids``. Methods check the type."""

    value: object
    path: str = "the body"

    def __getitem__(self, key: str | int) -> Field:
        """Return a key of an object, which may be null, or an entry of a list."""
        path = f"{self.path}.{key}"
        if isinstance(key, str):
            assert isinstance(self.value, Mapping), f"{self.path} is {self.shown}; expected an object with {key!r}"
            assert key in self.value, f"{path} is absent"
            return Field(self.value[key], path)
        assert isinstance(self.value, list), f"{self.path} is {self.shown}; expected a list"
        assert -len(self.value) <= key < len(self.value), f"{path} is absent: there are {len(self.value)} entries"
        return Field(self.value[key], path)

    @property
    def shown(self) -> str:
        """The value as JSON, cut."""
        written = json.dumps(self.value)
        return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}…"

    def entries(self) -> list[Field]:
        """Return the entries of a list."""
        assert isinstance(self.value, list), f"{self.path} is {self.shown}; expected a list"
        return [Field(value, f"{self.path}.{index}") for index, value in enumerate(self.value)]

    def mapping(self) -> Mapping[str, object]:
        """Return an object."""
        assert isinstance(self.value, Mapping), f"{self.path} is {self.shown}; expected an object"
        return self.value

    def text(self) -> str:
        """Return a string."""
        assert isinstance(self.value, str), f"{self.path} is {self.shown}; expected a string"
        return self.value

    def integer(self) -> int:
        """Return an integer."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise AssertionError(f"{self.path} is {self.shown}; expected an integer")
        return self.value

    def number(self) -> float:
        """Return a finite number that is no stand-in for infinity."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise AssertionError(f"{self.path} is {self.shown}; expected a number")
        assert math.isfinite(self.value), f"{self.path} is {self.value}; expected a finite number"
        assert self.value != -9999.0, f"{self.path} is -9999.0, which stands for minus infinity"
        return float(self.value)

    def ids(self) -> list[int]:
        """Return a list of token ids."""
        return [entry.integer() for entry in self.entries()]

    def numbers(self) -> list[float]:
        """Return a list of finite numbers."""
        return [entry.number() for entry in self.entries()]

    def is_null(self) -> bool:
        """Return True for null."""
        return self.value is None

    def equals(self, expected: object) -> None:
        """Assert the value."""
        assert self.value == expected, f"{self.path} is {self.shown}; expected {json.dumps(expected)}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and body of one answer."""

    asked: str
    """Method and path of the request."""
    status: int
    headers: Mapping[str, str]
    """By lowercase name."""
    content: bytes

    def json(self) -> Field:
        """Return the body, which must be strict JSON: no NaN and no Infinity."""
        return parsed(self.content, f"the body of {self.asked}")

    def require(self, status: int) -> None:
        """Raise unless the answer has this status."""
        assert self.status == status, f"{self.asked} got {self.shown}; expected {status}"

    @property
    def shown(self) -> str:
        """Status and body, cut."""
        text = self.content.decode(errors="replace")
        return f"{self.status} {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"


def parsed(content: bytes | str, what: str) -> Field:
    """Return strict JSON as a field."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{what} holds {constant}, which is not JSON")

    try:
        return Field(json.loads(content, parse_constant=refuse))
    except ValueError as error:
        raise AssertionError(f"{what} is not JSON: {content[:_SHOWN]!r}: {error}") from None
