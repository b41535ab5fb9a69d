"""An OpenAPI document made from the application's routes, and the types that they read and answer with."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.routing import Route

from drivetrain_serving.http_layer.error_statuses import PlainErrorBody
from drivetrain_serving.http_layer.route_docs import JSON, STREAM, TEXT, RouteDoc, doc_of
from drivetrain_serving.openapi.answer_schemas import schema_of

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{model}"
_KEY: Final = "key"
KeyName = Literal["none", "api", "control"]
_TAGS: Final[Mapping[KeyName, str]] = {
    "none": "Routes that need no key.",
    "api": "Routes that the API key opens.",
    "control": "Routes that the control key opens.",
}


def document_of(
    routes: Sequence[Route],
    key_of: Callable[[str], KeyName],
    errors_of: Callable[[str], Sequence[object]] = lambda path: (),
) -> Json:
    """Return the document, in OpenAPI 3.1.

    Args:
        routes: The application's routes. Each answer was described by ``documented``.
        key_of: Returns the key that opens a path; each route is tagged with it.
        errors_of: Returns the types of bodies of errors that the application makes for a path.

    Raises:
        LookupError: A route is not documented, or two models have one name.
    """
    schemas: Json = {}
    paths: dict[str, Json] = {}
    for route in routes:
        for method in sorted(route.methods or ()):
            if method != "HEAD":  # answered as GET, without the body
                operation = _operation(route, method, schemas, key_of(route.path), errors_of(route.path))
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


def _operation(route: Route, method: str, schemas: Json, key: KeyName, errors: Sequence[object]) -> Json:
    doc = doc_of(route.endpoint)
    if doc is None:
        raise LookupError(f"{method} {route.path}: {route.endpoint} is not documented; decorate it with @documented")
    operation: Json = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path_format).rstrip('_')}",
        "tags": [key],
        "description": _described(route.endpoint),
        "responses": dict(
            _responses(doc, schemas, None if doc.errors is None else (*errors, *doc.errors), is_open=key == "none")
        ),
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


def _responses(
    doc: RouteDoc, schemas: Json, errors: Sequence[object] | None, *, is_open: bool
) -> Iterator[tuple[str, Json]]:
    success, *others = doc.statuses
    yield str(success), _response(success, {kind: _content(kind, doc, schemas, errors or ()) for kind in doc.media})
    for status in others:
        yield str(status), _response(status, {} if errors is None else _of_errors(errors, schemas))
    if not is_open:
        for status in (401, 403):
            yield str(status), _response(status, _of_errors([PlainErrorBody], schemas))


def _response(status: int, content: Json) -> Json:
    described: Json = {"description": HTTPStatus(status).phrase}
    return described | {"content": content} if content else described


def _content(kind: str, doc: RouteDoc, schemas: Json, errors: Sequence[object]) -> Json:
    if kind == STREAM:
        return {"schema": _of_event([_add_type(one, schemas) for one in (doc.event, *errors)])}
    if kind.startswith("text/"):
        return {"schema": {"type": "string"}}
    return {"schema": _add_type(doc.answer, schemas)}


def _of_event(data: list[Json]) -> Json:
    """Return the schema of a server-sent event: OpenAPI 3.1 has no place for it but the schema of the stream."""
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": data}}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": text}, "required": ["data"]}


def _of_errors(errors: Sequence[object], schemas: Json) -> Json:
    objects = [_add_type(one, schemas) for one in errors if one is not str]
    content: Json = {TEXT: {"schema": {"type": "string"}}} if str in errors else {}
    if objects:
        content[JSON] = {"schema": objects[0] if len(objects) == 1 else {"anyOf": objects}}
    return content


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
    _add({**schema.pop("$defs", {}), model.__name__: schema}, schemas)
    return {"$ref": _REF.format(model=model.__name__)}


def _add_type(kind: object, schemas: Json) -> Json:
    """Add the schemas of a type of answers; return the schema to refer to it."""
    schema, defined = schema_of(kind, _REF)
    _add(defined, schemas)
    return schema


def _add(found: Mapping[str, Json], schemas: Json) -> None:
    for name, one in found.items():
        if schemas.setdefault(name, one) != one:
            raise LookupError(f"{name} is the name of two types of bodies; rename one")


def _used(schemas: Mapping[str, Json], paths: object) -> Json:
    """Return the schemas that the paths refer to, directly or through other schemas."""
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
