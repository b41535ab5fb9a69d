"""Entry point of the vLLM plugin. Imports no engine."""

from __future__ import annotations

from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.remote import VLLMServerBackend


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide vLLM, as an engine started here or a server running elsewhere."""
    return [VLLMBackend, VLLMServerBackend]
