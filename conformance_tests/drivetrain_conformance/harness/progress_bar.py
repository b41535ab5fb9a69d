"""Progress of a long run, shown in a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from drivetrain.cli.output import err


class Advance(Protocol):
    """Shows the run's current part, and that ``by`` more parts are done."""

    def __call__(self, description: str, by: int = 1) -> None: ...


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Advance]:
    """Show a bar on stderr during the block, if stderr is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda description, by=1: progress.update(task, advance=by, description=description)
