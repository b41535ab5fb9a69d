"""Command line of a host's Python, and remedies if it fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drivetrain.errors import EngineStartError


def command(python: str | None, *arguments: str) -> list[str]:
    """Return the command line of a host: unbuffered, and without the working folder on its import path."""
    return [python or sys.executable, "-u", "-P", "-X", "faulthandler", "-m", "drivetrain.process", *arguments]


def cannot_run(python: str | None, error: OSError) -> EngineStartError:
    """Make the error for an interpreter that cannot be run."""
    return EngineStartError(
        f"cannot run {python or sys.executable!r}: {error.strerror or error}; give python= the path of the Python "
        "executable of the environment that holds the engine"
    )


def why_not(python: str | None, log: Sequence[str]) -> str:
    """Return the remedy if an interpreter's log shows that drivetrain is not installed there; else ""."""
    said = "\n".join(log)
    for module in ("'drivetrain'", "'drivetrain.process'"):
        if f"No module named {module}" in said:
            shown = python or sys.executable
            return (
                f"the environment of {shown!r} does not hold this drivetrain; install the same version there: "
                f"{shown} -m pip install drivetrain"
            )
    return ""
