"""An OpenAPI document made from the application's routes and the models that they read."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.routing import Route

from drivetrain_serving.http.route_docs import JSON, RouteDoc, doc_of

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{model}"
_KEY: Final = "key"
KeyName = Literal["none", "api", "control"]
_TAGS: Final[Mapping[KeyName, str]] = {
    "none": "Routes that need no key.",
    "api": "Routes that the API key opens.",
    "control": "Routes that the control key opens.",
}


def document_of(routes: Sequence[Route], key_of: Callable[[str], KeyName]) -> Json:
    """Return the document, in OpenAPI 3.1.

    Args:
        routes: The application's routes. Each answer was described by ``documented``.
        key_of: Returns the key that opens a path; each route is tagged with it.

    Raises:
        LookupError: nothing was said of a route, or two models have one name.
    """
    schemas: Json = {}
    paths: dict[str, Json] = {}
    for route in routes:
        for method in sorted(route.methods or ()):
            if method != "HEAD":  # answered as GET, without the body
                operation = _operation(route, method, schemas, key_of(route.path))
                paths.setdefault(route.path_format, {}).setdefault(method.lower(), operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "drivetrain serve",
            "version": importlib.metadata.version("drivetrain"),
            "description": "Routes of OpenAI, vLLM and SGLang over any engine.",
        },
        "tags": [{"name": name, "description": says} for name, says in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": _used(schemas, paths),
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
        "security": [{_KEY: []}, {}],
    }


def _operation(route: Route, method: str, schemas: Json, key: KeyName) -> Json:
    doc = doc_of(route.endpoint)
    if doc is None:
        raise LookupError(f"{method} {route.path}: {route.endpoint} is not documented; decorate it with @documented")
    operation: Json = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path_format).rstrip('_')}",
        "tags": [key],
        "description": _described(route.endpoint),
        "responses": dict(_responses(doc, is_open=key == "none")),
    }
    parameters = [*_in_path(route), *_in_query(doc.query)]
    if parameters:
        operation["parameters"] = parameters
    if doc.body is not None and method != "GET":
        content = {JSON: {"schema": _schema(doc.body, schemas)}}
        operation["requestBody"] = {"content": content, "required": "required" in schemas[doc.body.__name__]}
    if key == "none":
        operation["security"] = []
    return operation


def _described(answer: Callable[..., object]) -> str:
    first = (answer.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(first.replace("``", "`").split())


def _responses(doc: RouteDoc, *, is_open: bool) -> Iterator[tuple[str, Json]]:
    success, *others = doc.statuses
    answer: Json = {"description": HTTPStatus(success).phrase}
    if doc.media:
        answer["content"] = {kind: {} for kind in doc.media}
    yield str(success), answer
    for status in sorted({*others, *(() if is_open else (401,))}):
        yield str(status), {"description": HTTPStatus(status).phrase}


def _in_path(route: Route) -> Iterator[Json]:
    for name in route.param_convertors:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(query: type[BaseModel] | None) -> Iterator[Json]:
    if query is None:
        return
    for name, schema in query.model_json_schema()["properties"].items():
        description = schema.pop("description", "")
        yield {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _schema(model: type[BaseModel], schemas: Json) -> Json:
    """Add the schemas of a model and of the models in its fields; return a reference to it."""
    schema = model.model_json_schema(ref_template=_REF)
    for name, one in {**schema.pop("$defs", {}), model.__name__: schema}.items():
        if schemas.setdefault(name, one) != one:
            raise LookupError(f"{name} is the name of two models of requests; rename one")
    return {"$ref": _REF.format(model=model.__name__)}


def _used(schemas: Mapping[str, Json], paths: object) -> Json:
    """Return the schemas that the paths refer to: some are those of fields that have other names on the wire."""
    found: Json = {}
    while missing := {*_references(paths), *_references(found)} - found.keys():
        found |= {name: schemas[name] for name in missing}
    return dict(sorted(found.items()))


def _references(value: object) -> Iterator[str]:
    """Yield the names of the schemas that a part of the document refers to."""
    if isinstance(value, Mapping):
        if isinstance(name := value.get("$ref"), str):
            yield name.removeprefix(_REF.format(model=""))
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _references(one)
