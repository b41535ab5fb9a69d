"""Request bodies: bounded in bytes and time, decoded from JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain_serving.config import ServerConfig

_T = TypeVar("_T")
_M = TypeVar("_M", bound=BaseModel)


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Return the body.

    Raises:
        HTTPException: 413, it is larger than ``max_body_bytes``; 408, it took longer than ``body_timeout``, or its next
            part longer than ``receive_timeout``.
    """
    most = config.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise HTTPException(413, f"the body has {announced} bytes; at most {most} are taken")
    now = asyncio.get_running_loop().time
    end = now() + config.body_timeout

    def next_due() -> float:
        return min(end, now() + config.receive_timeout)

    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout_at(next_due()) as waiting:
            async for part in request.stream():
                waiting.reschedule(next_due())
                size += len(part)
                if size > most:
                    raise HTTPException(413, f"the body has more than {most} bytes")
                parts.append(part)
    except TimeoutError:
        within = f"within {config.body_timeout:g} s, or no part of it within {config.receive_timeout:g} s"
        raise HTTPException(408, f"the body did not come {within}") from None
    return b"".join(parts)


async def read_json(
    request: Request, config: ServerConfig, *, wants_type: bool = False, header_ids: bool = False
) -> dict[str, object]:
    """Return the body as a JSON object; an empty body is an empty object.

    Args:
        request: The request.
        config: Its bounds.
        wants_type: Refuse a body that is not called ``application/json``.
        header_ids: Let the header ``X-Request-Id`` give the request its id; see :func:`identify_by_header`.

    Raises:
        HTTPException: 400, it is no JSON object; 413 and 408 as :func:`read_body`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if wants_type and kind != "application/json":
        raise HTTPException(400, f"Content-Type is {kind!r}; expected application/json")
    body = await read_body(request, config)
    try:
        value: object = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"Invalid JSON format: {error}") from None
    fields = {} if value is None else value
    if not isinstance(fields, dict):
        raise HTTPException(400, f"the body is a {type(fields).__name__}; expected an object")
    if header_ids:
        identify_by_header(fields, request)
    return fields


def identify_by_header(body: dict[str, object], request: Request) -> None:
    """Put ``X-Request-Id`` in place of the body's ``request_id``, as vLLM does on routes whose answers have an id."""
    if given := request.headers.get("X-Request-Id"):
        body["request_id"] = given


async def read_fields(request: Request, config: ServerConfig, kind: type[_M], *, wants_type: bool = False) -> _M:
    """Return the fields of a body whose values the route checks by itself; see :func:`read_json`.

    Args:
        request: The request.
        config: Its bounds.
        kind: The fields. Others are ignored.
        wants_type: Refuse a body that is not called ``application/json``.
    """
    return kind.model_validate(await read_json(request, config, wants_type=wants_type))


def text_of(value: object, field: str) -> str:
    """Return a field's value if it is a text that is not empty.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field}={shown(value)}: expected a text that is not empty", field=field)
    return value


def list_of(value: object, field: str) -> list[object]:
    """Return a field's value if it is a list.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}={shown(value)}: expected a list", field=field)
    return value


def flag_of(value: object, field: str, *, default: bool = False) -> bool:
    """Return a field's value if it is a boolean; null is the default.

    Raises:
        InvalidRequest: it is none.
    """
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{field}={shown(value)}: expected true or false", field=field)
    return value


def version_of(value: object) -> str | None:
    """Return the ``weight_version`` of a request, which may be a number; None if it is null or empty.

    Raises:
        InvalidRequest: it is neither a text nor an integer.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidRequest(f"weight_version={shown(value)}: expected a text", field="weight_version")
    return str(value) or None


def query_flag(query: Mapping[str, str], name: str, default: bool) -> bool:
    """Return a boolean of the query, written as vLLM reads it.

    Raises:
        HTTPException: 400, it is no boolean.
    """
    given = query.get(name)
    if given is None:
        return default
    match given.lower():
        case "true" | "1" | "yes" | "on" | "t" | "y":
            return True
        case "false" | "0" | "no" | "off" | "f" | "n":
            return False
    raise HTTPException(400, f"{name}={given!r} is no boolean; expected true or false")


async def unless_disconnected(receive: Callable[[], Awaitable[object]], work: Awaitable[_T]) -> _T:
    """Return the result of ``work``; cancel it when the client disconnects.

    Call it after reading the body: the next message is then the disconnect.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnected(receive: Callable[[], Awaitable[object]]) -> None:
    """Wait until the client has closed the connection."""
    while True:
        message = await receive()
        if isinstance(message, dict) and message.get("type") == "http.disconnect":
            return
