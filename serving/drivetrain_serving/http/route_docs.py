"""Descriptions of routes for the OpenAPI document, kept at the functions that answer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict

_F = TypeVar("_F", bound=Callable[..., object])
_NAME: Final = "__route_doc__"
_OF_BODIES: Final = (400, 408, 413)
OF_ENGINES: Final = (500, 501, 503, 504)
"""Statuses of a call of the engine that fails, that it cannot do, that its state does not allow, or that timed out."""

JSON: Final = "application/json"
TEXT: Final = "text/plain"
STREAM: Final = "text/event-stream"


class Fields(BaseModel):
    """Fields of a body or a query by their names on the wire.

    The route itself checks values, in its dialect's order and words, so that a field is an ``object`` here; its
    ``json_schema_extra`` says what the route takes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The request and the answers of a route."""

    body: type[BaseModel] | None = None
    """The JSON object that it reads."""
    needs_body: bool = False
    """True if an empty body is refused."""
    query: type[BaseModel] | None = None
    """The parameters of its query."""
    statuses: tuple[int, ...] = (200,)
    """Statuses of its answers, without those of keys."""
    media: tuple[str, ...] = (JSON,)
    """Media types of an answer with the status 200; none: it has no body."""


def documented(
    *,
    body: type[BaseModel] | None = None,
    needs_body: bool = False,
    query: type[BaseModel] | None = None,
    statuses: tuple[int, ...] = OF_ENGINES,
    media: tuple[str, ...] = (JSON,),
    success: int = 200,
) -> Callable[[_F], _F]:
    """Say what a route takes and answers. Its docstring is the description.

    Args:
        body: The JSON object that it reads.
        needs_body: True if an empty body is refused.
        query: The parameters of its query.
        statuses: Statuses of its answers beside ``success`` and those of wrong bodies.
        media: Media types of an answer that succeeds.
        success: Status of an answer that succeeds.
    """
    of_body = _OF_BODIES if body is not None else (400,) if query is not None else ()
    doc = RouteDoc(body, needs_body, query, (success, *sorted({*of_body, *statuses})), media)

    def attach(answer: _F) -> _F:
        setattr(answer, _NAME, doc)
        return answer

    return attach


def doc_of(answer: Callable[..., object]) -> RouteDoc | None:
    """Return what was said of a route; None if nothing was."""
    found: RouteDoc | None = getattr(answer, _NAME, None)
    return found
