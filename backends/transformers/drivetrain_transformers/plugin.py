"""Entry point of the transformers plugin. Imports no engine."""

from __future__ import annotations

from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain_transformers.engine import TransformersBackend


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide the transformers backend."""
    return [TransformersBackend]
