"""From vLLM's errors to drivetrain's."""

from __future__ import annotations

from drivetrain.errors import DrivetrainError, EngineDied, EngineInternalError, EngineOutOfMemory, InvalidRequest

OUT_OF_MEMORY = ("out of memory", "not enough memory", "cannot allocate memory", "no available memory")
"""Words by which vLLM's errors are known to mean it."""
DEAD = "enginecore encountered an issue"
"""What vLLM's EngineDeadError says, which is all that its server passes on."""


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Return ``error`` as a member of drivetrain's tree; out of memory is told from everything else."""
    if isinstance(error, DrivetrainError):
        return error
    if type(error).__name__ == "EngineGenerateError" and error.__cause__ is not None:
        return as_engine_error(error.__cause__)  # it says nothing itself
    words = str(error).lower()
    mapped: DrivetrainError
    if type(error).__name__ == "EngineDeadError" or DEAD in words:
        mapped = EngineDied("vLLM's engine core ended")
    elif any(known in words for known in OUT_OF_MEMORY):
        mapped = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    elif isinstance(error, ValueError) or any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__):
        mapped = InvalidRequest(f"vLLM refused the request: {error}", field="sampling_params")
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
