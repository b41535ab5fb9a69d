"""JSON Schemas of the types of answers. An object has no other fields than its type."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import is_typeddict

Json = dict[str, Any]


class _Closed(GenerateJsonSchema):
    """Refuses fields that a ``TypedDict`` does not have."""

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        """Return the schema of a ``TypedDict``."""
        return {**super().typed_dict_schema(schema), "additionalProperties": False}


@cache
def schema_of(kind: Any, ref_template: str) -> tuple[Json, Mapping[str, Json]]:
    """Return the schema of a type, and those of the types in it by their names.

    Args:
        kind: A type hint.
        ref_template: As pydantic's. A ``TypedDict`` is referred to by it.
    """
    schema = TypeAdapter(kind).json_schema(ref_template=ref_template, schema_generator=_Closed)
    defined: dict[str, Json] = schema.pop("$defs", {})
    if not is_typeddict(kind):
        return schema, defined
    return {"$ref": ref_template.format(model=kind.__name__)}, {**defined, kind.__name__: schema}
