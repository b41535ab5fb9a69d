"""Token ids are checked as pydantic checks them."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from drivetrain.types.token_ids import TokenId, TokenIds, highest

PLAIN: TypeAdapter[Any] = TypeAdapter(tuple[TokenId, ...])
CHECKED: TypeAdapter[Any] = TypeAdapter(TokenIds)


class Named(enum.IntEnum):
    END = 7


class Sub(int):
    """An int of a user's own class."""


VALUES: list[Any] = [
    *([], [1, 2], (1, 2), [0] * 5000, range(3), [2**31, 2**70], [Named.END], [Sub(3)]),
    *([1, True], [1, 1.0], [1, -1], [1, np.int64(3)], ["1"], [None], [[1]], "abc", b"abc", None, 5, {1: 2}),
    *(np.arange(3), {1, 2}),
]


def judged(adapter: TypeAdapter[Any], value: Any) -> object:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        return [(one["type"], one["loc"], one["msg"]) for one in error.errors(include_url=False)]


@pytest.mark.parametrize("value", VALUES, ids=[f"{place}: {type(one).__name__}" for place, one in enumerate(VALUES)])
def test_values_are_judged_as_by_pydantic(value: Any) -> None:
    expected = judged(PLAIN, value)
    found = judged(CHECKED, value)
    assert found == expected
    if isinstance(found, tuple) and isinstance(expected, tuple):
        assert [type(one) for one in found] == [type(one) for one in expected]


def test_an_iterator_is_judged_as_by_pydantic() -> None:
    assert judged(CHECKED, iter([1, 2])) == judged(PLAIN, iter([1, 2]))


def test_the_schema_is_that_of_a_list_of_ids() -> None:
    assert CHECKED.json_schema() == PLAIN.json_schema()


@pytest.mark.parametrize("length", [1, 1024, 1025, 5000])
@pytest.mark.parametrize("most", [0, 255, 2**31, 2**32 - 1, 2**32, 2**70])
def test_the_highest_id_is_found(length: int, most: int) -> None:
    ids = [0] * length
    ids[length // 2] = most
    assert highest(ids) == most
