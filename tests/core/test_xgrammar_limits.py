"""Schemas and expressions: what xgrammar ignores is refused, and what is not refused holds."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
import regex
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from drivetrain.backend.toolkit.xgrammar_limits import KNOWN_KEYWORDS, ignored_anchors, ignored_keywords

INTEGER = {"type": "integer"}
A, B = {"const": 1}, {"const": 2}
AB: dict[str, Any] = {"type": "object", "properties": {"a": A, "b": B}}

IGNORED: list[tuple[Any, object]] = [
    ({"type": "number", "multipleOf": 5}, 7),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [1, 1]),
    ({"type": "array", "items": {"enum": [1, 2]}, "contains": A}, [2]),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, "a"),
    ({"type": "string", "format": "idn-hostname"}, "!!"),
    ({"type": "string", "format": "date", "minLength": 50}, "2020-01-01"),
    ({"type": "object", "properties": {"ab": A}, "propertyNames": {"type": "string", "maxLength": 1}}, {"ab": 1}),
    ({"type": "object", "required": ["a"]}, {}),
    ({**AB, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}),
    ({"type": "integer", "not": {"const": 3}}, 3),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, 7),
    ({"type": "integer", "minimum": 5, "anyOf": [INTEGER, {"type": "null"}]}, 3),
    ({**AB, "required": ["a"], "anyOf": [{"type": "object"}]}, {}),
    ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 5}, 3),
    ({"type": "string", "const": 1}, 1),
    ({"type": "string", "enum": ["a", 1]}, 1),
    ({"enum": ["a", "bcd"], "minLength": 2}, "a"),
    ({"minimum": 5}, 3),
    ({"type": "array", "items": {"type": "object", "properties": {"x": {"minLength": 3}}}}, [{"x": "a"}]),
]


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    octets = [bytes([octet]) for octet in range(256)]
    info = xgrammar.TokenizerInfo([*octets, b""], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def accepts(compiler: xgrammar.GrammarCompiler, schema: Any, value: object) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(octet) for octet in json.dumps(value).encode()) and matcher.accept_token(256)


@pytest.mark.parametrize(("schema", "wrong"), IGNORED)
def test_what_xgrammar_ignores_is_found(compiler: xgrammar.GrammarCompiler, schema: Any, wrong: object) -> None:
    assert accepts(compiler, schema, wrong), "xgrammar holds it by now, so it need not be refused"
    assert list(ignored_keywords(schema))


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(max_length=8)] | None = None


class Home(BaseModel):
    """A schema as pydantic writes it: references, unions, defaults, lists and mappings."""

    pets: Annotated[list[Annotated[Cat | Dog, Field(discriminator="kind")]], Field(min_length=1)]
    colour: Literal["red", "green"] = "red"
    rooms: dict[str, int] = {}
    first: Cat | None = None


HELD: list[tuple[Any, object, object]] = [
    ({"type": "integer", "maximum": 3}, 3, 4),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "ab", "a"),
    ({"type": "string", "pattern": "^a+$"}, "aa", "b"),
    ({"type": "string", "format": "date"}, "2020-01-01", "x"),
    ({"type": "string", "enum": ["a", "b"], "description": "a letter"}, "a", "c"),
    ({"type": ["integer", "null"]}, None, "x"),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2, "uniqueItems": False}, [1], []),
    ({**AB, "required": ["a"], "additionalProperties": False}, {"a": 1}, {"b": 2}),
    ({"anyOf": [A, B]}, 1, 3),
    (Home.model_json_schema(), {"pets": [{"kind": "cat", "lives": 9}]}, {"pets": [{"kind": "cow"}]}),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD)
def test_what_xgrammar_holds_is_not_refused(
    compiler: xgrammar.GrammarCompiler, schema: Any, right: object, wrong: object
) -> None:
    assert list(ignored_keywords(schema)) == []
    assert accepts(compiler, schema, right)
    assert not accepts(compiler, schema, wrong)


def test_the_place_is_named() -> None:
    schema = {"$defs": {"x/y": {"type": "array", "contains": A}}, "type": "object", "properties": {"a": {"not": {}}}}
    assert list(ignored_keywords(schema)) == ["contains at #/$defs/x/y", "not at #/properties/a"]


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        (r"a\Z", [r"\Z at character 1"]),
        (r"\Aa", [r"\A at character 0"]),
        ("a$b", ["$ at character 1"]),
        ("x(^a|b)", ["^ at character 2"]),
        ("^(a|b)$", []),
        (r"[^a$^]+\$\^[]^]", []),
        (r"\d+\s\w\.\\A[\]^]", []),
    ],
)
def test_anchors_that_xgrammar_ignores_are_found(expression: str, found: list[str]) -> None:
    assert list(ignored_anchors(expression)) == found


KEYWORDS = sorted(
    {"$ref", "$defs", "type", "required", "properties", "patternProperties", "const", "enum", "oneOf"} | KNOWN_KEYWORDS
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "object", "date", "#/$defs/a", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
)


@given(VALUES)
def test_what_is_no_schema_is_left_to_xgrammar(value: object) -> None:
    assert all(isinstance(words, str) for words in ignored_keywords(value))


@given(st.text(alphabet="ab^$[]()\\|*-Zd", max_size=12))
def test_any_expression_that_compiles_is_read(expression: str) -> None:
    try:
        regex.compile(expression)
    except regex.error:
        return
    assert all(" at character " in words for words in ignored_anchors(expression))
