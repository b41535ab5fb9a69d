"""``drivetrain host``: an engine that serves other processes until it is told to end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from drivetrain.attached.remote import KEY_VARIABLE
from drivetrain.cli.configuration import (
    BackendOption,
    ConfigOption,
    IsolationOption,
    ModelOption,
    SettingsOption,
    configuration,
)
from drivetrain.cli.running import started
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.listener import check_address, check_certificate, check_key
from drivetrain.errors import InvalidConfig
from drivetrain.types.handle import EngineHandle


def host(
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to listen on; port 0: any free one. Without it: a Unix socket that only this user can open.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    backend: BackendOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    isolation: IsolationOption = None,
    announce: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Host name of the printed endpoint, in place of --listen's.", show_default=False
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the key, of at least 16 characters. Without it: {KEY_VARIABLE} of the environment, or a "
            "random key, which is printed.",
            show_default=False,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="PEM file with a certificate: encrypt connections by TLS.", show_default=False),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the certificate's private key, without a password. Without it: --ssl-certfile.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start an engine that other processes use: create_engine("remote", endpoint=..., key=...).

    Prints the endpoint, the key and the certificate's fingerprint once the engine is ready. SIGTERM and Ctrl-C end the
    command and its engine.
    """
    key = _key(key_file)
    if key is not None:
        check_key(key)
    check_address(listen, announce)
    certificate = _certificate(listen, ssl_certfile, ssl_keyfile)
    engine = create_engine(configuration(config, settings or [], backend, model, isolation))
    asyncio.run(_serve(engine, listen, key, announce, certificate))


def _key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read the key of --key-file {str(file)!r}: {error}", field="key") from error


def _certificate(listen: str | None, certfile: Path | None, keyfile: Path | None) -> dict[str, str]:
    """Return the files as arguments of ``handle``, once they were read: an engine may take minutes to start."""
    given = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    files = {name: str(file) for name, file in given.items() if file is not None}
    check_certificate(listen, files.get("ssl_certfile"), files.get("ssl_keyfile"))
    return files


async def _serve(
    engine: InferenceEngine, listen: str | None, key: str | None, announce: str | None, certificate: dict[str, str]
) -> None:
    async with started(engine) as until_end:
        if until_end is not None:
            _print(await engine.handle(listen, key=key, announce=announce, **certificate), shows_key=key is None)
            await until_end()


def _print(handle: EngineHandle, *, shows_key: bool) -> None:
    lines = [f"endpoint: {handle.address}", *[f"key: {handle.key}"] * shows_key]
    if handle.ssl_fingerprint is not None:
        lines.append(f"fingerprint: {handle.ssl_fingerprint}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
