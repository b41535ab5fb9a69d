"""Types shared by the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from drivetrain import InferenceEngine

OpenEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Opens a throwaway engine on the tiny model; keyword arguments are fields of its configuration."""
