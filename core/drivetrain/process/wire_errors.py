"""Exceptions on the wire: drivetrain's keep their class, all others become :class:`EngineInternalError`."""

from __future__ import annotations

import traceback
from typing import Final

import msgspec

from drivetrain import errors
from drivetrain.errors import DrivetrainError, EngineInternalError, from_wire, to_wire
from drivetrain.process.wire import Failure

_TRACEBACK_LINES: Final = 12


def failure(call_id: int, error: BaseException) -> Failure:
    """Encode the exception that a call raised."""
    if not isinstance(error, DrivetrainError):
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_TRACEBACK_LINES:]
        words = f"{type(error).__name__}: {error}"
        return Failure(call_id, EngineInternalError.__name__, "\n".join([words, *lines]), {})
    _, message, fields = to_wire(error)
    # A plugin may derive its own classes; the other side knows only those of drivetrain.errors.
    known = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return Failure(call_id, known, message, {name: _plain(value) for name, value in fields.items()})


def exception(described: Failure) -> DrivetrainError:
    """Rebuild the exception that :func:`failure` encoded."""
    return from_wire(described.error, described.message, described.fields)


def _plain(value: object) -> object:
    try:
        msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return repr(value)
    return value
