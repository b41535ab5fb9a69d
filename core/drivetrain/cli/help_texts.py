"""Help texts of commands, from their docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable


def help_of(command: Callable[..., object]) -> str | None:
    """Return a command's help: its docstring, each paragraph on one line, because typer keeps line breaks."""
    text = inspect.getdoc(command)
    return None if text is None else re.sub(r"(?<=\S)\n(?!(?:[*-]|\d+[.)])\s)(?=\S)", " ", text)
