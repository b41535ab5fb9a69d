"""Types and constants that a JSON schema accepts; enough of it to interpret values written as bare text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from pydantic import JsonValue

TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_LIKE: Final = {
    **{"str": "string", "text": "string", "bool": "boolean", "int": "integer", "float": "number", "double": "number"},
    **{"list": "array", "tuple": "array", "dict": "object", "map": "object", "none": "null"},
}
"""Type names that are not JSON schema's but are used in schemas."""
_DEEPEST: Final = 32


@dataclass(frozen=True, slots=True)
class Accepted:
    """Types and constants that a schema accepts."""

    types: frozenset[str] = TYPES
    """Type names; "number" always comes with "integer"."""
    constants: tuple[JsonValue, ...] | None = None
    """The only accepted values, if the schema lists them."""

    def and_also(self, other: Accepted) -> Accepted:
        """Return the intersection with ``other``."""
        constants = self.constants if self.constants is not None else other.constants
        if self.constants is not None and other.constants is not None:
            constants = tuple(one for one in self.constants if any(same(one, two) for two in other.constants))
        return Accepted(self.types & other.types, constants)

    def or_else(self, other: Accepted) -> Accepted:
        """Return the union with ``other``."""
        both = self.constants is not None and other.constants is not None
        constants = (*(self.constants or ()), *(other.constants or ())) if both else None
        return Accepted(self.types | other.types, constants)


ANYTHING: Final = Accepted()
NOTHING: Final = Accepted(frozenset(), ())


class Parameters:
    """Parameters of one function. References in their schema are resolved from its root."""

    def __init__(self, schema: dict[str, JsonValue]) -> None:
        self._root = schema
        self._references: dict[str, Accepted] = {}

    @property
    def required(self) -> frozenset[str]:
        """Names of the required parameters."""
        names = self._root.get("required")
        return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()

    @property
    def types(self) -> frozenset[str]:
        """Types of the values that the schema accepts."""
        return self._of(self._root, 0).types

    def __contains__(self, key: object) -> bool:
        return any(key in properties for properties in self._properties(self._root, 0))

    def accepted(self, key: str) -> Accepted | None:
        """Return the values that a parameter accepts; None if the schema does not know the parameter."""
        for properties in self._properties(self._root, 0):
            if key in properties:
                return self._of(properties[key], 0)
        others = self._root.get("additionalProperties")
        return self._of(others, 0) if isinstance(others, dict) and others else None

    def _properties(self, schema: JsonValue, depth: int) -> list[Mapping[str, JsonValue]]:
        """Return the properties of an object schema, including those of its ``$ref`` and ``allOf`` parts."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return []
        own = schema.get("properties")
        found: list[Mapping[str, JsonValue]] = [own] if isinstance(own, dict) else []
        if isinstance(reference := schema.get("$ref"), str) and depth == 0:
            found += self._properties(self._resolve(reference), depth + 1)
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) and depth == 0 else []:
            found += self._properties(part, depth + 1)
        return found

    def _of(self, schema: JsonValue, depth: int) -> Accepted:
        if schema is False:
            return NOTHING
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return ANYTHING
        found = _own(schema)
        if isinstance(reference := schema.get("$ref"), str):
            found = found.and_also(self._referenced(reference, depth))
        for word in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(word), list) and choices:
                either = NOTHING
                for choice in choices:
                    either = either.or_else(self._of(choice, depth + 1))
                found = found.and_also(either)
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                found = found.and_also(self._of(part, depth + 1))
        if schema.get("nullable") is True:
            found = found.or_else(Accepted(frozenset({"null"}), (None,)))
        return found

    def _referenced(self, reference: str, depth: int) -> Accepted:
        if reference not in self._references:
            self._references[reference] = ANYTHING  # for a schema that refers to itself
            self._references[reference] = self._of(self._resolve(reference), depth + 1)
        return self._references[reference]

    def _resolve(self, reference: str) -> JsonValue:
        """Return the target of a JSON pointer; True, a schema that accepts anything, if it does not resolve."""
        if not reference.startswith("#"):
            return True
        at: JsonValue = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and key in at:
                at = at[key]
            elif isinstance(at, list) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(at):
                at = at[int(key)]
            else:
                return True
        return at


def _own(schema: Mapping[str, JsonValue]) -> Accepted:
    """Return what a schema accepts by its own type, enum and const."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = frozenset(_LIKE.get(name.lower(), name.lower()) for name in names if isinstance(name, str)) & TYPES
    if not names:
        types = (
            frozenset({"object"}) if "properties" in schema else frozenset({"array"}) if "items" in schema else TYPES
        )
    if "number" in types:
        types |= {"integer"}
    found = Accepted(types or TYPES, (None,) if types == {"null"} else None)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = found.and_also(Accepted(frozenset(map(type_of, values)), tuple(values)))
    return found


def type_of(value: JsonValue) -> str:
    """Return the JSON schema type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def same(one: JsonValue, other: JsonValue) -> bool:
    """Return True if two JSON values are equal; True and 1 are not."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)
