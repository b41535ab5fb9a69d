"""``drivetrain backends``: lists the backends, or the capabilities of one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from drivetrain.backend.registry import BackendInfo, BackendStatus, list_backends, load_backend
from drivetrain.cli.output import err, out, print_json
from drivetrain.create import create_engine
from drivetrain.types.capability import Capability

COLOURS = {
    BackendStatus.AVAILABLE: "green",
    BackendStatus.BROKEN: "bold red",
    BackendStatus.DISABLED: "dim",
    BackendStatus.ENGINE_MISSING: "yellow",
}


def backends(
    name: Annotated[
        str | None, typer.Argument(help="Show the capabilities of this backend.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With NAME: folder or hub id of the model.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """List the backends and their status, or the capabilities of one backend."""
    if name is None:
        if model is not None:
            raise typer.BadParameter("--model needs the name of a backend", param_hint="--model")
        _list(as_json)
    else:
        if model is None:
            load_backend(name)  # an unknown name is the first mistake to mend
            raise typer.BadParameter(
                f"the capabilities of {name} depend on the model; add --model DIR_OR_ID", param_hint="--model"
            )
        _capabilities(name, model, as_json)


def _list(as_json: bool) -> None:
    infos = list_backends()
    if as_json:
        print_json({"backends": [_as_json(info) for info in infos]})
        return
    table = Table("backend", "state", "plugin", "engine", box=None, pad_edge=False, header_style="bold")
    for info in infos:
        table.add_row(
            Text(info.name),
            Text(info.status.value, style=COLOURS[info.status]),
            Text(f"{info.distribution or 'this program'} {info.version or ''}".strip()),
            Text(f"{info.engine_distribution or '?'} {info.engine_version or ''}".strip()),
        )
    out.print(table)
    for info in infos:
        if info.reason:
            err.print(Text(f"{info.name}: {info.reason}"), soft_wrap=True)


def _capabilities(name: str, model: str, as_json: bool) -> None:
    engine = create_engine(name, model=model)
    if as_json:
        print_json(
            {
                "backend": name,
                "model": model,
                "isolation": engine.isolation.value,
                "versions": {**engine.versions},
                "capabilities": [
                    {"name": one.value, "claimed": one in engine.capabilities, "meaning": one.meaning}
                    for one in Capability
                ],
            }
        )
        return
    table = Table("", "capability", "meaning", box=None, pad_edge=False, header_style="bold")
    for one in Capability:
        claimed = one in engine.capabilities
        mark = Text("yes", "green") if claimed else Text("no", "dim")
        table.add_row(mark, Text(one.value), Text(one.meaning, "" if claimed else "dim"))
    out.print(table)


def _as_json(info: BackendInfo) -> dict[str, str | None]:
    return {
        "name": info.name,
        "status": info.status.value,
        "distribution": info.distribution,
        "version": info.version,
        "engine_distribution": info.engine_distribution,
        "engine_version": info.engine_version,
        "reason": info.reason,
    }
