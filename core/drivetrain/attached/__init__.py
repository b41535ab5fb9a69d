"""Engines that another process owns, used through a handle."""

from __future__ import annotations

from drivetrain.attached.engine import AttachedEngine, attach

__all__ = ["AttachedEngine", "attach"]
