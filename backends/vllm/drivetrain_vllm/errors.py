"""Map vLLM's errors to drivetrain's."""

from __future__ import annotations

from drivetrain.backend.toolkit.out_of_memory import is_out_of_memory
from drivetrain.backend.toolkit.translation import refused_field
from drivetrain.errors import DrivetrainError, EngineDied, EngineInternalError, EngineOutOfMemory, InvalidRequest

OUT_OF_MEMORY = ("no available memory",)
"""Phrases in vLLM's own errors that mean that memory ran out."""
DEAD = "enginecore encountered an issue"
"""Message of vLLM's EngineDeadError; its server passes on nothing else."""


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Map ``error`` to a drivetrain error: a dead engine, out of memory, a refused request, or an internal error."""
    if isinstance(error, DrivetrainError):
        return error
    if type(error).__name__ == "EngineGenerateError" and error.__cause__ is not None:
        return as_engine_error(error.__cause__)  # the wrapper itself has no message
    words = str(error).lower()
    mapped: DrivetrainError
    if type(error).__name__ == "EngineDeadError" or DEAD in words:
        mapped = EngineDied("vLLM's engine core ended")
    elif is_out_of_memory(error, OUT_OF_MEMORY):
        mapped = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    elif isinstance(error, ValueError) or any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__):
        field = refused_field(error)
        mapped = InvalidRequest(f"vLLM refused {field}: {error}", field=field)
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
