"""Commands that other packages add through the entry-point group ``drivetrain.commands``.

The entry point's name is the command's; its value is a typer command function or a ``typer.Typer``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Final

import typer

from drivetrain.cli.help_texts import help_of
from drivetrain.cli.output import print_error, print_warning

GROUP: Final = "drivetrain.commands"


def add_extensions(app: typer.Typer, *, taken: Collection[str], wanted: str | None) -> None:
    """Add other packages' commands to ``app``. A broken command is reported on stderr and does not affect the others.

    Args:
        app: The application to extend.
        taken: Names of drivetrain's own commands, which cannot be replaced.
        wanted: The command that will run; only its package is imported. None: the list of commands is wanted, so all
            are imported.
    """
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    for name, entries in sorted(found.items()):
        if name in taken:
            print_warning(f"the command {name!r} of {_origins(entries)} is ignored: drivetrain has one of that name")
        elif wanted in (None, name):
            _add(app, name, entries)


def _add(app: typer.Typer, name: str, entries: list[importlib.metadata.EntryPoint]) -> None:
    if len(entries) > 1:
        return _add_broken(app, name, f"several packages provide it: {_origins(entries)}; uninstall all but one")
    try:
        command: object = entries[0].load()
    except (Exception, SystemExit) as error:
        return _add_broken(app, name, f"{_origins(entries)} does not load: {type(error).__name__}: {error}")
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    elif isinstance(command, FunctionType):
        function: Callable[..., object] = command
        app.command(name, help=help_of(function))(function)
    else:
        _add_broken(app, name, f"{_origins(entries)} is {command!r}; expected a function or a typer.Typer")


def _add_broken(app: typer.Typer, name: str, reason: str) -> None:
    """Report a broken command and add a failing one in its place, so that it does not look unknown."""
    print_error(f"the command {name!r} is broken: {reason}")
    app.command(
        name,
        help="(broken; see the error above)",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(_fail())


def _fail() -> Callable[[], None]:
    def broken() -> None:
        raise typer.Exit(1)

    return broken


def _origins(entries: list[importlib.metadata.EntryPoint]) -> str:
    return " and ".join(f"{entry.value} ({entry.dist.name if entry.dist else 'unknown'})" for entry in entries)
