"""Folders that an engine writes into."""

from __future__ import annotations

from pathlib import Path

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest


def made_folder(directory: str, field: str) -> Path:
    """Return a folder, made if it is missing. Blocks.

    Raises:
        InvalidRequest: It cannot be made; ``field`` is the argument that names it.
    """
    try:
        folder = Path(directory).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(
            f"{field}={shown(directory)}: no folder can be made there: {error}; name another", field=field
        ) from error
    return folder
