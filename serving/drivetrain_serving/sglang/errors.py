"""Errors in the forms in which SGLang's server writes them: its own routes nest them, its OpenAI routes do not."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal, NotRequired

from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from drivetrain.errors import (
    DrivetrainError,
    EngineBusy,
    InvalidRequest,
    UnsupportedCapability,
)
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.error_statuses import (
    UNREAD,
    AboutError,
    PlainErrorBody,
    described,
    field_of,
    status_of,
)


class ErrorText(TypedDict):
    """The text of an error."""

    message: str


class NestedErrorBody(TypedDict):
    """Body of an error on SGLang's own routes."""

    error: ErrorText
    drivetrain: AboutError


class FlatErrorBody(TypedDict):
    """Body of an error on OpenAI's routes, and of requests that HTTP refuses."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int
    drivetrain: NotRequired[AboutError]


class StreamErrorDetails(ErrorText):
    """Details of an error that ends a stream."""

    type: Literal["invalid_request_error"]
    code: int
    retryable: Literal[False]


class StreamErrorBody(TypedDict):
    """Last event of a stream of ``/generate`` that failed."""

    error: StreamErrorDetails
    drivetrain: AboutError


class FailureBody(TypedDict):
    """Body of a request to change weights that failed."""

    success: Literal[False]
    message: str
    drivetrain: AboutError
    num_paused_requests: NotRequired[int]


class BrokenContract(Exception):
    """A sampling parameter of ``/generate`` has a wrong type, or is unknown."""


def status_here(error: DrivetrainError) -> int:
    """Return the status of an error on SGLang's own routes: a refusal is 400, also of something that is unsupported."""
    return 400 if isinstance(error, InvalidRequest | UnsupportedCapability | EngineBusy) else status_of(error)


def body_of(error: DrivetrainError) -> NestedErrorBody:
    """Return the body of an error on SGLang's own routes."""
    return {"error": {"message": str(error)}, "drivetrain": described(error)}


def error_answer(error: DrivetrainError) -> Response:
    """Return the answer to a request to one of SGLang's own routes that failed."""
    return json_answer(body_of(error), status_here(error))


def contract_answer(error: BrokenContract) -> Response:
    """Return the answer to a body of ``/generate`` that breaks its contract."""
    return json_answer(PlainErrorBody(error=str(error)), 400)


def stream_body(error: DrivetrainError) -> StreamErrorBody:
    """Return the last event of a stream of ``/generate`` that failed."""
    about = StreamErrorDetails(
        message=str(error), type="invalid_request_error", code=status_here(error), retryable=False
    )
    return {"error": about, "drivetrain": described(error)}


def flat_body(error: DrivetrainError) -> FlatErrorBody:
    """Return the body of an error on OpenAI's routes."""
    status = status_of(error)
    return {**_flat(status, str(error), _kind(status), field_of(error)), "drivetrain": described(error)}


def flat_error_answer(error: DrivetrainError) -> Response:
    """Return the answer to a request to one of OpenAI's routes that failed."""
    return json_answer(flat_body(error), status_of(error))


def failure_answer(error: DrivetrainError, paused: int | None = None) -> Response:
    """Return the answer to a request to change weights that failed.

    Args:
        error: The error.
        paused: Number of requests that were paused, of routes that tell it.
    """
    body = FailureBody(success=False, message=str(error), drivetrain=described(error))
    if paused is not None:
        body["num_paused_requests"] = paused
    return json_answer(body, status_here(error))


def http_error_answer(error: HTTPException) -> Response:
    """Return the answer to a request that HTTP itself refuses: its path, method, size or JSON."""
    answer = json_answer(_flat(error.status_code, error.detail, str(error.status_code), None), error.status_code)
    if error.status_code in UNREAD:
        answer.headers["connection"] = "close"  # else the server would read on to the end of the body
    return answer


def _kind(status: int) -> str:
    return "BadRequestError" if status == 400 else HTTPStatus(status).phrase


def _flat(status: int, message: str, kind: str, param: str | None) -> FlatErrorBody:
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}
