"""Map SGLang's errors to drivetrain's."""

from __future__ import annotations

from drivetrain.backend.toolkit.translation import refused_field
from drivetrain.errors import DrivetrainError, EngineInternalError, EngineOutOfMemory, InvalidRequest

OUT_OF_MEMORY = ("out of memory", "not enough memory", "kv cache pool is full", "cannot allocate memory")
"""Phrases in SGLang's errors that mean that memory ran out."""


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Map ``error`` to a drivetrain error: out of memory, a refused request, or an internal error."""
    if isinstance(error, DrivetrainError):
        return error
    words = str(error).lower()
    mapped: DrivetrainError
    if any(known in words for known in OUT_OF_MEMORY):
        mapped = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    elif isinstance(error, ValueError):
        field = refused_field(error)
        mapped = InvalidRequest(f"SGLang refused {field}: {error}", field=field)
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
