"""Output of the command line: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(document: Mapping[str, object]) -> None:
    """Write one JSON document to stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_error(message: str, kind: str = "error") -> None:
    """Write an error to stderr without markup, so that ``[transformers]`` stays, and without cutting long lines."""
    err.print(Text.assemble((f"{kind}: ", "bold red"), message), soft_wrap=True)


def print_warning(message: str) -> None:
    """Write a warning to stderr."""
    err.print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


def log_handler() -> logging.Handler:
    """Return a handler that writes the log to stderr: in colours in a terminal, else one line for each message."""
    if err.is_terminal:
        handler: logging.Handler = RichHandler(console=err, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:  # rich would break lines after 80 characters
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


@contextmanager
def progress(title: str) -> Generator[Callable[[str], None]]:
    """Show stages on stderr during the block: with a spinner in a terminal, else one line per stage."""
    if not err.is_terminal:
        yield lambda stage: err.print(Text(f"{title}: {stage}"), soft_wrap=True)
        return
    with err.status(Text(title)) as status:
        yield lambda stage: status.update(Text(f"{title}: {stage}"))
