"""Imports of packages that only an extra of drivetrain installs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.errors import MissingDependency


@contextmanager
def from_extra(extra: str, user: str) -> Iterator[None]:
    """Import packages of ``extra`` inside; a missing one is reported with the command that installs it.

    If blocks are nested, the error names the outermost extra, which includes the others.

    Args:
        extra: Extra of the distribution, such as ``"weight-sync"``.
        user: The feature that needs the package, such as ``"weight sync"``; begins the message.

    Raises:
        MissingDependency: A package is not installed.
    """
    try:
        yield
    except (ModuleNotFoundError, MissingDependency) as error:
        package = (error.name or str(error)).partition(".")[0]
        missing = MissingDependency(
            f"{user} needs the package {package!r}, which is not installed in the environment of {sys.executable}; "
            f"run there: pip install 'drivetrain[{extra}]'"
        )
        missing.name = package
        raise missing from error
