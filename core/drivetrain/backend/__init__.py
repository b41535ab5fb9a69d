"""For plugin authors: the ``Backend`` page, the hook, and plugin discovery."""

from __future__ import annotations

from drivetrain.backend.base import (
    Backend,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReadMedium,
    StopKind,
    TokenDelta,
)

__all__ = [
    "Backend",
    "EngineStats",
    "GenerateRequest",
    "GenerateResult",
    "ModelInfo",
    "ReadMedium",
    "StopKind",
    "TokenDelta",
]
