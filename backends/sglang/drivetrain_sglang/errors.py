"""From SGLang's errors to drivetrain's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from drivetrain.errors import DrivetrainError, EngineInternalError, EngineOutOfMemory, InvalidRequest

OUT_OF_MEMORY = ("out of memory", "not enough memory", "kv cache pool is full", "cannot allocate memory")
"""Words by which SGLang's errors are known to mean it."""


def as_engine_error(error: BaseException) -> DrivetrainError:
    """Return ``error`` as a member of drivetrain's tree; out of memory is told from everything else."""
    if isinstance(error, DrivetrainError):
        return error
    words = str(error).lower()
    mapped: DrivetrainError
    if any(known in words for known in OUT_OF_MEMORY):
        mapped = EngineOutOfMemory(f"{type(error).__name__}: {error}")
    elif isinstance(error, ValueError):
        mapped = InvalidRequest(f"SGLang refused the request: {error}", field="sampling_params")
    else:
        mapped = EngineInternalError(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped


def from_http(status: int, body: bytes | Mapping[str, Any], path: str) -> DrivetrainError:
    """Return what a server's refusal means: its status, and its body as it came or decoded."""
    said = _message(body)
    if status in (400, 422):
        return as_engine_error(ValueError(said))
    return as_engine_error(RuntimeError(f"{path} answered with HTTP {status}: {said}"))


def _message(body: bytes | Mapping[str, Any]) -> str:
    if isinstance(body, bytes):
        try:
            return _message(msgspec.json.decode(body, type=dict[str, Any]))
        except msgspec.DecodeError:
            return body[:500].decode(errors="replace")
    error = body.get("error", body)
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("detail") or error
    return str(error)
