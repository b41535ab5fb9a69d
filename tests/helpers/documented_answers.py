"""Answers of a server against its own OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
from jsonschema import Draft202012Validator

JSON, STREAM = "application/json", "text/event-stream"


class Document:
    """An OpenAPI document, and the operations whose answers it was compared with.

    Args:
        document: The document.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = document["components"]
        self.operations = {
            (method.upper(), path): operation
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }
        self.seen: set[tuple[str, str, int]] = set()
        """(Method, path, status) of each answer that was compared."""

    def errors(self, response: httpx.Response) -> list[str]:
        """Return what the document does not allow in an answer that was read to its end."""
        method, path = self._operation(response.request)
        responses = self.operations[method, path]["responses"]
        self.seen.add((method, path, response.status_code))
        described = responses.get(str(response.status_code))
        if described is None:
            return [f"status {response.status_code}: expected one of {', '.join(responses)}"]
        content = described.get("content", {})
        kind = response.headers.get("content-type", "").partition(";")[0]
        if not content:
            return [f"the answer has {len(response.content)} bytes; expected none"] if response.content else []
        if kind not in content:
            return [f"content type {kind!r}: expected one of {', '.join(content)}"]
        if kind == STREAM:
            schema = content[kind]["schema"]["properties"]["data"]["contentSchema"]
            return [one for event in events_of(response.text) for one in self.violations(event, schema)]
        return [*self.violations(response.json() if kind == JSON else response.text, content[kind]["schema"])]

    def violations(self, value: Any, schema: dict[str, Any]) -> Iterator[str]:
        """Yield what a schema of the document does not allow in a value."""
        for error in Draft202012Validator({**schema, "components": self._components}).iter_errors(value):
            details = [f"{one.json_path}: {one.message[:200]}" for one in error.context or ()]
            yield f"{error.json_path}: {error.message[:500]} {details}"

    def schema_of(self, method: str, path: str) -> dict[str, Any]:
        """Return the schema of an operation's answer with the status 200."""
        schema: dict[str, Any] = self.operations[method, path]["responses"]["200"]["content"][JSON]["schema"]
        return schema

    def _operation(self, request: httpx.Request) -> tuple[str, str]:
        for method, path in self.operations:
            pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
            if method == request.method and re.fullmatch(pattern, request.url.path):
                return method, path
        raise AssertionError(f"{request.method} {request.url.path}: the document has no such operation")


def events_of(text: str) -> Iterator[Any]:
    """Yield the events of a stream, without its end."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
