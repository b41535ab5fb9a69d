"""Progress on stderr: a live table in a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from drivetrain_demo.result import StepRecord

ROWS: Final = 10
"""Latest steps in the live table."""


class PlainDisplay:
    """One line per stage and step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, stage: str) -> None:
        """Show a stage of starting."""
        self._console.print(Text(f"starting: {stage}"), soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        synced = f", sync {record.training.sync_seconds * 1e3:.0f} ms" if record.training else ""
        self._console.print(
            Text(
                f"{record.version}: reward {record.reward:.3f}, right {record.accuracy:.0%}, "
                f"logprob gap {record.logprob_gap:.1e}, {record.tokens_per_second:.0f} tokens/s{synced}"
            ),
            soft_wrap=True,
        )


class LiveDisplay:
    """A progress bar over a table of the latest steps."""

    def __init__(self, live: Live, steps: int) -> None:
        self._live = live
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), auto_refresh=False
        )
        # One rollout more than updates: the last one measures the last update.
        self._task = self._bar.add_task("starting", total=steps + 1)
        self._latest: deque[StepRecord] = deque(maxlen=ROWS)
        self._show()

    def stage(self, stage: str) -> None:
        """Show a stage of starting."""
        self._bar.update(self._task, description=stage)
        self._show()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        self._latest.append(record)
        self._bar.update(self._task, description="training", completed=record.step + 1)
        self._show()

    def _show(self) -> None:
        self._live.update(Group(self._bar, _table(self._latest)) if self._latest else self._bar)


@contextmanager
def display(console: Console, steps: int) -> Iterator[LiveDisplay | PlainDisplay]:
    """Show progress on ``console`` while the block runs."""
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield LiveDisplay(live, steps)


def _table(records: deque[StepRecord]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("version", "reward", "right", "logprob gap", "sync ms", "tokens/s"):
        table.add_column(name, justify="left" if name == "version" else "right", no_wrap=True)
    table.add_column("one completion", no_wrap=True, overflow="ellipsis")
    for record in records:
        table.add_row(
            record.version,
            f"{record.reward:.3f}",
            f"{record.accuracy:.0%}",
            f"{record.logprob_gap:.1e}",
            f"{record.training.sync_seconds * 1e3:.0f}" if record.training else "",
            f"{record.tokens_per_second:.0f}",
            Text(repr(record.example)[1:-1]),
        )
    return table
