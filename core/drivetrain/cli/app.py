"""The ``drivetrain`` application: its commands, global options and error output.

Exit codes: 0 success, 1 a failed check or a drivetrain error, 2 wrong usage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NoReturn

import typer

import drivetrain
from drivetrain.cli.backends import backends
from drivetrain.cli.doctor import doctor
from drivetrain.cli.extensions import add_extensions
from drivetrain.cli.generate import generate
from drivetrain.cli.help_texts import help_of
from drivetrain.cli.host import host
from drivetrain.cli.output import log_handler, out, print_error
from drivetrain.errors import DrivetrainError

BUILT_IN: Final[dict[str, Callable[..., None]]] = {
    "backends": backends,
    "doctor": doctor,
    "generate": generate,
    "host": host,
}


@dataclass
class _Settings:
    traceback: bool = False


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: Arguments without the program's name; None: those of the process.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    settings = _Settings()
    app = _app(settings, arguments)
    try:
        app(args=arguments, prog_name="drivetrain")
    except DrivetrainError as error:
        if settings.traceback:
            raise
        print_error(str(error), type(error).__name__)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(drivetrain.__version__)
        raise typer.Exit


def _app(settings: _Settings, arguments: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="drivetrain",
        help="One interface between an RL trainer and any LLM inference engine.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
        verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show drivetrain's log on stderr.")] = False,
        version: Annotated[
            bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
        ] = False,
    ) -> None:
        settings.traceback = traceback
        logging.basicConfig(level=logging.WARNING, handlers=[log_handler()])
        logging.getLogger("drivetrain").setLevel(logging.INFO if verbose else logging.WARNING)

    for name, command in BUILT_IN.items():
        app.command(name, help=help_of(command))(command)
    wanted = next((word for word in arguments if not word.startswith("-") or word == "--version"), None)
    add_extensions(app, taken=BUILT_IN, wanted=wanted)
    return app
