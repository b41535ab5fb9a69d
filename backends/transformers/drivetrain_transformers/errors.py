"""Map errors of torch and transformers to drivetrain's."""

from __future__ import annotations

from drivetrain.backend.toolkit.out_of_memory import is_out_of_memory
from drivetrain.errors import DrivetrainError, EngineInternalError, EngineOutOfMemory


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Map ``error`` to EngineOutOfMemory or EngineInternalError; return a drivetrain error unchanged."""
    import torch

    if isinstance(error, DrivetrainError):
        return error
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):
        mapped: DrivetrainError = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
