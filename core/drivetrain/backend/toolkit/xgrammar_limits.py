"""Parts of JSON schemas and regular expressions that xgrammar accepts and ignores; engines that use it refuse them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import EbnfGrammar, JsonSchema, RegexGrammar

Node = Mapping[str, object]

_IGNORED: Final = frozenset(
    {"$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"}
    | {"maxContains", "minContains", "multipleOf", "not", "then", "uniqueItems"}
)
_NUMBERS: Final = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_TEXTS: Final = frozenset({"format", "maxLength", "minLength", "pattern"})
_OBJECTS: Final = frozenset(
    {"additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "propertyNames"}
    | {"required", "unevaluatedProperties"}
)
_LISTS: Final = frozenset({"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"})
_ESCAPES: Final = frozenset("BDPSWbdfknprstuvwx")
"""Letters whose escape xgrammar knows, or refuses itself."""
_ALONE: Final = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
"""Keywords beside which xgrammar ignores all others, the first before the next."""
KNOWN_KEYWORDS: Final = _IGNORED.union(_NUMBERS, _TEXTS, _OBJECTS, _LISTS, _ALONE)
"""Keywords of JSON Schema that this module treats each in its own way."""
_FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer"}
    | {"time", "uri", "uri-reference", "uri-template", "uuid"}
)
_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}


def refuse_ignored_parts(grammar: JsonSchema | RegexGrammar | EbnfGrammar) -> None:
    """Refuse a grammar with a part that xgrammar would ignore.

    Raises:
        InvalidRequest: it has such a part, which the message names.
    """
    match grammar:
        case JsonSchema(json_schema=schema):
            found = _ignored_in_schema(schema)
        case RegexGrammar(regex=expression):
            found = next(ignored_anchors(expression), None)
        case EbnfGrammar():
            found = None
    if found is not None:
        field = "sampling_params.structured_output"
        raise InvalidRequest(
            f"{field}: {found} would be ignored by xgrammar, which this engine uses; say it otherwise, or leave it out",
            field=field,
        )


@lru_cache(maxsize=256)
def _ignored_in_schema(schema: str) -> str | None:
    return next(ignored_keywords(json.loads(schema)), None)


def ignored_keywords(schema: object, path: str = "#") -> Iterator[str]:
    """Yield what xgrammar would ignore in a schema, each as a few words with its place.

    Values of a wrong type are passed over: xgrammar refuses them, but for a format's.
    """
    if not isinstance(schema, dict):
        return
    for words in _ignored_here(schema):
        yield f"{words} at {path}"
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, dict) else ():
            yield from ignored_keywords(part, f"{path}/{key}/{name}")
    for key in ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        yield from ignored_keywords(schema.get(key), f"{path}/{key}")
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        parts = schema.get(key)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from ignored_keywords(part, f"{path}/{key}/{index}")


def ignored_anchors(expression: str) -> Iterator[str]:
    """Yield the anchors of a regular expression that xgrammar would ignore or read as letters."""
    in_class, at = False, 0
    while at < len(expression):
        character = expression[at]
        if character == "\\":
            escaped = expression[at + 1]
            if escaped.isalpha() and escaped not in _ESCAPES:
                yield f"\\{escaped} at character {at}"
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += expression[at + 1] == "^"
            at += expression[at + 1] == "]"  # a bracket that comes first is an ordinary character
        elif (character == "^" and at > 0) or (character == "$" and at < len(expression) - 1):
            yield f"{character} at character {at}"
        at += 1


def _ignored_here(schema: Node) -> Iterator[str]:
    """Yield the keywords of one schema that xgrammar ignores."""
    yield from (key for key in sorted(_IGNORED & schema.keys()) if schema[key] is not False)
    for key in _ALONE:
        if key in schema:
            others = schema.keys() & (_NUMBERS | _TEXTS | _OBJECTS | _LISTS | {*_ALONE, "type"}) - {key}
            if key in ("const", "enum") and _are_of_type(schema, key):
                others -= {"type"}
            yield from (f"{other} beside {key}" for other in sorted(others))
            parts = schema[key]
            if key == "allOf" and isinstance(parts, list) and len(parts) > 1:
                yield "all but the first of allOf"
            return
    if "type" not in schema:
        yield from (f"{key} without a type" for key in sorted((_NUMBERS | _TEXTS) & schema.keys()))
    lengths = sorted({"maxLength", "minLength"} & schema.keys())
    if lengths and {"pattern", "format"} & schema.keys():
        yield f"{lengths[0]} beside a pattern or format"
    form = schema.get("format")
    if form is not None and not (isinstance(form, str) and form in _FORMATS):
        yield f"the format {form!r}"
    properties = schema.get("properties", {})
    if "propertyNames" in schema and properties:
        yield "propertyNames beside properties"
    required = schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        unknown = (name for name in required if isinstance(name, str) and name not in properties)
        yield from (f"required {name!r}, which is none of properties," for name in unknown)


def _are_of_type(schema: Node, key: str) -> bool:
    """Return whether the values that a schema lists are of its type, which then says nothing more."""
    values = [schema[key]] if key == "const" else schema[key]
    named = schema.get("type", [])
    types = named if isinstance(named, list) else [named]
    known = tuple(_KINDS[name] for name in types if isinstance(name, str) and name in _KINDS)
    if not known or not isinstance(values, list):
        return False
    return all(
        any(isinstance(value, kind) and (not isinstance(value, bool) or kind is bool) for kind in known)
        for value in values
    )
