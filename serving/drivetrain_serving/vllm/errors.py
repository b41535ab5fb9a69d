"""Errors in the form in which vLLM's server writes them."""

from __future__ import annotations

from typing import Final, NotRequired

from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.error_statuses import (
    UNREAD,
    AboutError,
    PlainErrorBody,
    described,
    field_of,
    status_of,
)

_TYPES: Final = {
    400: "BadRequestError",
    401: "Unauthorized",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ErrorDetails(TypedDict):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(TypedDict):
    """Body of an error."""

    error: ErrorDetails
    drivetrain: NotRequired[AboutError]


def body_of(error: DrivetrainError) -> ErrorBody:
    """Return the body of an error; ``drivetrain`` names its class, and the field or capability that is meant."""
    return {**_body(status_of(error), str(error), field_of(error)), "drivetrain": described(error)}


def _body(status: int, message: str, param: str | None = None) -> ErrorBody:
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_answer(error: DrivetrainError) -> Response:
    """Return the answer to a request that failed."""
    return json_answer(body_of(error), status_of(error))


def plain_error_answer(error: DrivetrainError) -> Response:
    """Return the answer of the routes whose errors are a text, unless the request is wrong: pause, resume, abort."""
    if isinstance(error, InvalidRequest):
        return error_answer(error)
    return json_answer(PlainErrorBody(error=str(error)), status_of(error))


def http_error_answer(error: HTTPException) -> Response:
    """Return the answer to a request that HTTP itself refuses: its path, method, size or JSON."""
    answer = json_answer(_body(error.status_code, error.detail), error.status_code)
    if error.status_code in UNREAD:
        answer.headers["connection"] = "close"  # else the server would read on to the end of the body
    return answer


def forbidden(reason: str) -> Response:
    """Return the answer to a request that a page of another site may have made."""
    return json_answer(PlainErrorBody(error=f"Forbidden: {reason}"), 403)


def unauthorized() -> Response:
    """Return the answer to a request without the key."""
    return json_answer(PlainErrorBody(error="Unauthorized"), 401)
