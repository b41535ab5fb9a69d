"""The entry point: what this plugin provides. Imports no engine."""

from __future__ import annotations

from drivetrain.backend import Backend
from drivetrain.hookspecs import hookimpl
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.server import VLLMServerBackend


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide vLLM, started here or running somewhere."""
    return [VLLMBackend, VLLMServerBackend]
