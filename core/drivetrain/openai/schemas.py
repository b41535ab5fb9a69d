"""JSON schemas of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import JsonValue, ValidationError

from drivetrain.checks.pydantic_errors import reason_of
from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import JsonSchema


def grammar_of_schema(schema: Mapping[str, JsonValue], field: str) -> JsonSchema:
    """Return the grammar of a schema.

    Args:
        schema: A JSON schema.
        field: Field of the request that the schema comes from.

    Raises:
        InvalidRequest: A reference in the schema leads to nothing, or back to itself.
    """
    try:
        return JsonSchema(json_schema=json.dumps(schema, ensure_ascii=False))
    except ValidationError as error:
        raise InvalidRequest(f"{field}: {reason_of(error)}", field=field) from None
