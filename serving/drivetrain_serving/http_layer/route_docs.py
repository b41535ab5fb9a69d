"""Descriptions of routes for the OpenAPI document, kept at the functions that answer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

_F = TypeVar("_F", bound=Callable[..., object])
_NAME: Final = "__route_doc__"
_OF_BODIES: Final = (400, 408, 413)
OF_ENGINES: Final = (500, 501, 503, 504)
"""Statuses of a call of the engine that fails, that it cannot do, that its state does not allow, or that timed out."""

JSON: Final = "application/json"
TEXT: Final = "text/plain"
STREAM: Final = "text/event-stream"


def _require(schema: JsonDict) -> None:
    """Require the fields that cannot be null and have no default."""
    fields = schema.get("properties", {})
    assert isinstance(fields, dict)
    required = [name for name, field in fields.items() if isinstance(field, dict) and _is_required(field)]
    if required:
        schema["required"] = [*required]


def _is_required(field: JsonDict) -> bool:
    if field.get("default") is not None:
        return False
    kinds = [field, *(one for one in _list(field.get("anyOf")) if isinstance(one, dict))]
    return not any(
        "null" in (one.get("type"), *_list(one.get("type"))) or None in _list(one.get("enum")) for one in kinds
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


class Fields(BaseModel):
    """Fields of a body or a query by their names on the wire.

    The route itself checks values, in its dialect's order and words, so that a field is an ``object`` here; its
    ``json_schema_extra`` documents the values that the route takes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_require)


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The request and the answers of a route."""

    body: type[BaseModel] | None = None
    """The JSON object that it reads."""
    query: type[BaseModel] | None = None
    """The parameters of its query."""
    statuses: tuple[int, ...] = (200,)
    """Statuses of its answers, without those of keys."""
    media: tuple[str, ...] = (JSON,)
    """Media types of an answer that succeeds; none: it has no body."""
    answer: object = None
    """Type of the JSON of an answer that succeeds; None is JSON's null."""
    event: object = None
    """Type of the JSON of an event, of answers that are streams. An error's body may be the last event."""
    errors: tuple[object, ...] | None = ()
    """Types of bodies of errors that the route makes by itself; ``str`` is a text. None: errors have no body."""


def documented(
    *,
    body: type[BaseModel] | None = None,
    query: type[BaseModel] | None = None,
    statuses: tuple[int, ...] = OF_ENGINES,
    media: tuple[str, ...] = (JSON,),
    success: int = 200,
    answer: object = None,
    event: object = None,
    errors: tuple[object, ...] | None = (),
) -> Callable[[_F], _F]:
    """Document the requests and answers of a route. Its docstring becomes the description.

    Args:
        body: The JSON object that it reads.
        query: The parameters of its query.
        statuses: Statuses of its answers beside ``success`` and those of wrong bodies.
        media: Media types of an answer that succeeds.
        success: Status of an answer that succeeds.
        answer: Type of the JSON of an answer that succeeds, such as a ``TypedDict``; None is JSON's null.
        event: Type of the JSON of an event, of answers that are streams.
        errors: Types of bodies of errors that the route makes by itself, beside those of the path; ``str`` is a text.
            None: errors have no body.
    """
    of_body = _OF_BODIES if body is not None else (400,) if query is not None else ()
    doc = RouteDoc(body, query, (success, *sorted({*of_body, *statuses})), media, answer, event, errors)

    def attach(route: _F) -> _F:
        setattr(route, _NAME, doc)
        return route

    return attach


def doc_of(answer: Callable[..., object]) -> RouteDoc | None:
    """Return a route's documentation, or None if it has none."""
    found: RouteDoc | None = getattr(answer, _NAME, None)
    return found
