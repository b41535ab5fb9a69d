"""The command ``drivetrain check``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from drivetrain.cli.configuration import ConfigOption, IsolationOption, SettingsOption, configuration
from drivetrain.cli.output import err, out, print_error, progress
from drivetrain.errors import BackendError, InvalidConfig, MissingDependency, UnsupportedCapability
from drivetrain.types.config import EngineConfig
from drivetrain_conformance.check.report import CheckReport, CheckRow, Outcome

_STYLES: Final = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.NOT_CLAIMED: "yellow",
    Outcome.NOT_RUN: "yellow",
}


def check(
    backend: Annotated[str, typer.Argument(help="The backend's name.")],
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model.", show_default=False)] = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    isolation: IsolationOption = None,
    long_prompt: Annotated[
        int, typer.Option(min=1, help="Most tokens of the long prompt; give more than the model's sliding window.")
    ] = 1024,
    reference_device: Annotated[
        str | None,
        typer.Option(help="Device of transformers.", show_default="a GPU with enough free memory, else the CPU"),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report to this file, as JSON; - is stdout.")
    ] = None,
) -> None:
    """Check that an engine computes a model as transformers does: logprobs, weight updates, sleep.

    Takes about a minute and one engine. Exits with 1 if a row failed, with 2 for a mistake in the arguments.
    """
    try:
        wanted = configuration(config, settings or [], backend, model, isolation)
        report = _run(wanted, long_prompt, reference_device)
    except (InvalidConfig, BackendError, MissingDependency, UnsupportedCapability) as error:
        print_error(str(error), type(error).__name__)
        raise typer.Exit(2) from None
    if json is not None and str(json) != "-":
        report.write(json)
    if str(json) == "-":
        sys.stdout.buffer.write(report.to_json())
        sys.stdout.buffer.flush()
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


def _run(config: EngineConfig, long_prompt: int, reference_device: str | None) -> CheckReport:
    from drivetrain_conformance.check.reference import require_transformers

    require_transformers()  # else importing weight sync would name a smaller extra
    from drivetrain_conformance.check.run import check_engine

    with progress("check") as tell:
        return asyncio.run(
            check_engine(
                config, tell=tell, row_done=_tell_row, long_prompt=long_prompt, reference_device=reference_device
            )
        )


def _tell_row(row: CheckRow) -> None:
    err.print(Text.assemble(_outcome(row), f"  {row.name}: {row.seen}  ({row.seconds:.1f} s)"), soft_wrap=True)


def _outcome(row: CheckRow) -> Text:
    return Text(f"{row.outcome.value:11}", _STYLES[row.outcome])


def _show(report: CheckReport) -> None:
    table = Table("", "check", "seen", "held against", box=None, pad_edge=False, header_style="bold")
    table.add_column("s", justify="right")
    for row in report.rows:
        table.add_row(_outcome(row), Text(row.name), Text(row.seen), Text(row.against), f"{row.seconds:.1f}")
    out.print(table)
    for word, wanted in (("claims", True), ("does not claim", False)):
        if names := ", ".join(name for name, claimed in report.claims.items() if claimed is wanted):
            out.print(Text(f"{word}: {names}"), soft_wrap=True)
    out.print(Text(f"reference: {report.reference}"), soft_wrap=True)
    failed = [row.name for row in report.rows if row.outcome is Outcome.FAILED]
    verdict = f"failed: {', '.join(failed)}" if failed else "computes this model as transformers does"
    out.print(
        Text(f"{report.backend} {verdict}; {report.seconds:.0f} s", "bold red" if failed else "green"), soft_wrap=True
    )
