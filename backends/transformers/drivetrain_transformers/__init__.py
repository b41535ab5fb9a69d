"""The embedded backend: any causal LM of transformers, with no server and no GPU needed."""

from __future__ import annotations

from drivetrain_transformers.engine import TransformersBackend

__all__ = ["TransformersBackend"]
