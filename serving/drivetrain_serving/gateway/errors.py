"""Refusals of the gateway, beside those of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from drivetrain.errors import DrivetrainError
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.error_statuses import status_of
from drivetrain_serving.vllm import errors as of_vllm


class SessionNotFound(DrivetrainError):
    """No session has that id."""


class SessionFull(DrivetrainError):
    """The session has its maximum number of turns."""


class SessionBusy(DrivetrainError):
    """Requests of the session are in flight."""


class GatewayFull(DrivetrainError):
    """There is no room for another session or turn."""


_STATUSES: Final[Mapping[type[DrivetrainError], tuple[int, str]]] = {
    SessionNotFound: (404, "NotFoundError"),
    SessionFull: (400, "BadRequestError"),
    SessionBusy: (409, "ConflictError"),
    GatewayFull: (503, "ServiceUnavailableError"),
}


def body_and_status(error: DrivetrainError) -> tuple[of_vllm.ErrorBody, int]:
    """Return the body of an error in the form of the other routes' errors, and its status."""
    found = _STATUSES.get(type(error))
    if found is None:
        return of_vllm.body_of(error), status_of(error)
    status, kind = found
    said: of_vllm.ErrorDetails = {"message": str(error), "type": kind, "param": None, "code": status}
    return {"error": said, "drivetrain": {"error": type(error).__name__}}, status


def error_answer(error: DrivetrainError) -> Response:
    """Return the answer to a request that failed."""
    return json_answer(*body_and_status(error))
