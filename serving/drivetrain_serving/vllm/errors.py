"""Errors in the form in which vLLM's server writes them."""

from __future__ import annotations

from typing import Final

from starlette.exceptions import HTTPException
from starlette.responses import Response

from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineBusy,
    EngineOutOfMemory,
    EngineStateError,
    InvalidConfig,
    InvalidRequest,
    UnsupportedCapability,
    WeightVersionGone,
)
from drivetrain_serving.http.answers import json_answer

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
_STATUSES: Final[tuple[tuple[type[DrivetrainError], int], ...]] = (
    (InvalidRequest, 400),
    (InvalidConfig, 400),
    (UnsupportedCapability, 501),
    (EngineBusy, 503),
    (EngineStateError, 503),
    (EngineOutOfMemory, 503),
    (WeightVersionGone, 409),
    (DeadlineExceeded, 504),
)
_UNREAD: Final = frozenset({408, 413})
"""Statuses of requests whose body was not read to its end."""
_OVER: Final = frozenset({"failed", "closed"})
"""States that no waiting ends: 503 would make clients ask again for ever."""


def status_of(error: DrivetrainError) -> int:
    """Return the HTTP status of an error. A model or an adapter that is not served is 404, as there."""
    if isinstance(error, InvalidRequest) and error.field == "model":
        return 404
    if isinstance(error, EngineStateError) and error.state in _OVER:
        return 500
    return next((status for cls, status in _STATUSES if isinstance(error, cls)), 500)


def body_of(error: DrivetrainError) -> dict[str, object]:
    """Return the body of an error; ``drivetrain`` names its class, and the field or capability that is meant."""
    status = status_of(error)
    about: dict[str, object] = {"error": type(error).__name__}
    if isinstance(error, UnsupportedCapability):
        about["capability"] = error.capability
    if isinstance(error, EngineStateError):
        about["state"] = error.state
    field = error.field or None if isinstance(error, InvalidRequest | InvalidConfig) else None
    return {**_body(status, str(error), field), "drivetrain": about}


def _body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_answer(error: DrivetrainError) -> Response:
    """Return the answer to a request that failed."""
    return json_answer(body_of(error), status_of(error))


def plain_error_answer(error: DrivetrainError) -> Response:
    """Return the answer of the routes whose errors are a text, unless the request is wrong: pause, resume, abort."""
    if isinstance(error, InvalidRequest):
        return error_answer(error)
    return json_answer({"error": str(error)}, status_of(error))


def http_error_answer(error: HTTPException) -> Response:
    """Return the answer to a request that HTTP itself refuses: its path, method, size or JSON."""
    answer = json_answer(_body(error.status_code, error.detail), error.status_code)
    if error.status_code in _UNREAD:
        answer.headers["connection"] = "close"  # else the server would read on to the end of the body
    return answer


def unauthorized() -> Response:
    """Return the answer to a request without the key."""
    return json_answer({"error": "Unauthorized"}, 401)
