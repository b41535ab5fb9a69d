"""The ``drivetrain`` command line."""

from __future__ import annotations

from drivetrain.cli.app import main

__all__ = ["main"]
