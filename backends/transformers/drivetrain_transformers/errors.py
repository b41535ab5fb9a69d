"""Map errors of torch and transformers to drivetrain's."""

from __future__ import annotations

from drivetrain.errors import DrivetrainError, EngineInternalError, EngineOutOfMemory

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
"""Phrases in exceptions of other types that mean that memory ran out."""


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Map ``error`` to EngineOutOfMemory or EngineInternalError; return a drivetrain error unchanged."""
    import torch

    if isinstance(error, DrivetrainError):
        return error
    words = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(known in words for known in OUT_OF_MEMORY):
        mapped: DrivetrainError = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
