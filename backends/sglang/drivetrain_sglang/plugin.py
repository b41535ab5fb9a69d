"""The entry point: what this plugin provides. Imports no engine."""

from __future__ import annotations

from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.remote import SGLangServerBackend


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide SGLang, started here or running somewhere."""
    return [SGLangBackend, SGLangServerBackend]
