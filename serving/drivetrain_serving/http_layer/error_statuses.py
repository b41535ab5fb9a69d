"""The HTTP status of each error, the same in both dialects, and a description of the error for drivetrain's clients."""

from __future__ import annotations

from typing import Final, NotRequired

from typing_extensions import TypedDict

from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineBusy,
    EngineOutOfMemory,
    EngineStateError,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
    NoTokenAllowed,
    UnsupportedCapability,
    WeightBaseMismatch,
    WeightPlanMismatch,
    WeightVersionGone,
)

_STATUSES: Final[tuple[tuple[type[DrivetrainError], int], ...]] = (
    (InvalidRequest, 400),
    (InvalidConfig, 400),
    (NoTokenAllowed, 400),
    (WeightPlanMismatch, 400),
    (InvalidWeights, 400),
    (WeightBaseMismatch, 400),
    (UnsupportedCapability, 501),
    (EngineBusy, 503),
    (EngineStateError, 503),
    (EngineOutOfMemory, 503),
    (WeightVersionGone, 409),
    (DeadlineExceeded, 504),
)
UNREAD: Final = frozenset({408, 413})
"""Statuses of requests whose body was not read to its end."""
_OVER: Final = frozenset({"failed", "closed"})
"""States that no waiting ends: 503 would make clients ask again for ever."""


class AboutError(TypedDict):
    """drivetrain's own part of an error's body."""

    error: str
    """Class of the error."""
    capability: NotRequired[str]
    """The capability that the engine does not have, if one is meant."""
    state: NotRequired[str]
    """The engine's state that does not allow it."""


class PlainErrorBody(TypedDict):
    """Body of an error that is a text."""

    error: str


def status_of(error: DrivetrainError) -> int:
    """Return the HTTP status of an error. A model or an adapter that is not served is 404, as in vLLM."""
    if isinstance(error, InvalidRequest) and error.field == "model":
        return 404
    if isinstance(error, EngineStateError) and error.state in _OVER:
        return 500
    return next((status for cls, status in _STATUSES if isinstance(error, cls)), 500)


def field_of(error: DrivetrainError) -> str | None:
    """Return the field of the request that is wrong; None if no single field is."""
    return error.field or None if isinstance(error, InvalidRequest | InvalidConfig | NoTokenAllowed) else None


def described(error: DrivetrainError) -> AboutError:
    """Return the class of an error, and the capability or state that it is about."""
    about: AboutError = {"error": type(error).__name__}
    if isinstance(error, UnsupportedCapability) and error.capability:
        about["capability"] = error.capability
    if isinstance(error, EngineStateError):
        about["state"] = error.state
    return about
