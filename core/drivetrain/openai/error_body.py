"""Conversion of errors to the OpenAI API's format."""

from __future__ import annotations

from typing import Final

from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineBusy,
    EngineDied,
    EngineOutOfMemory,
    EngineStateError,
    InvalidRequest,
    MemberLost,
    UnsupportedCapability,
    WeightVersionGone,
)
from drivetrain.openai.responses import ErrorBody

_REQUEST: Final = "invalid_request_error"
_SERVER: Final = "server_error"

_TABLE: Final[tuple[tuple[type[DrivetrainError], int, str, str | None], ...]] = (
    (InvalidRequest, 400, _REQUEST, None),
    (UnsupportedCapability, 400, _REQUEST, "unsupported_capability"),
    (EngineBusy, 409, _SERVER, "engine_busy"),
    (EngineStateError, 503, _SERVER, "engine_state"),
    (EngineOutOfMemory, 503, _SERVER, "out_of_memory"),
    (EngineDied, 500, _SERVER, "engine_died"),
    (MemberLost, 500, _SERVER, "engine_lost"),
    (WeightVersionGone, 409, _SERVER, "weight_version_gone"),
    (DeadlineExceeded, 504, _SERVER, "timeout"),
)


def error_body(error: DrivetrainError) -> tuple[int, ErrorBody]:
    """Return the HTTP status and body of an error, in the format that OpenAI clients read.

    ``param`` names the wrong field. A model that is not served gives 404, as in the OpenAI API.
    """
    status, kind, code = next(
        ((status, kind, code) for cls, status, kind, code in _TABLE if isinstance(error, cls)), (500, _SERVER, None)
    )
    param = error.field or None if isinstance(error, InvalidRequest) else None
    if param == "model":
        status, code = 404, "model_not_found"
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
