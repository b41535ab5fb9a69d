"""Errors of an engine's start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.errors import EngineStartError, InvalidConfig, UnsupportedCapability


@contextmanager
def start_errors(engine: str) -> Iterator[None]:
    """Turn foreign exceptions within the ``with`` body into :class:`EngineStartError`, naming the engine."""
    try:
        yield
    except (InvalidConfig, EngineStartError, UnsupportedCapability):
        raise
    except Exception as error:
        raise EngineStartError(f"{engine} failed to start: {type(error).__name__}: {error}") from error
