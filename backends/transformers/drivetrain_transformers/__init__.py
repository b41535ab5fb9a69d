"""The embedded backend: any causal LM of transformers, without a server and without needing a GPU."""

from __future__ import annotations

from drivetrain_transformers.engine import TransformersBackend

__all__ = ["TransformersBackend"]
