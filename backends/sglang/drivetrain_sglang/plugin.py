"""Entry point of the SGLang plugin. Imports no engine."""

from __future__ import annotations

from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.remote import SGLangServerBackend


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide SGLang, as an engine started here or a server running elsewhere."""
    return [SGLangBackend, SGLangServerBackend]
