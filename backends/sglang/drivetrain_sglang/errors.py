"""Map SGLang's errors to drivetrain's."""

from __future__ import annotations

from drivetrain.backend.toolkit.out_of_memory import is_out_of_memory
from drivetrain.backend.toolkit.translation import refused_field
from drivetrain.errors import DrivetrainError, EngineInternalError, EngineOutOfMemory, InvalidRequest

OUT_OF_MEMORY = ("kv cache pool is full",)
"""Phrases in SGLang's own errors that mean that memory ran out."""


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Map ``error`` to a drivetrain error: out of memory, a refused request, or an internal error."""
    if isinstance(error, DrivetrainError):
        return error
    mapped: DrivetrainError
    if is_out_of_memory(error, OUT_OF_MEMORY):
        mapped = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    elif isinstance(error, ValueError):
        field = refused_field(error)
        mapped = InvalidRequest(f"SGLang refused {field}: {error}", field=field)
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
