"""``drivetrain host``: an engine that serves other processes until it is told to end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Coroutine
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
from drivetrain.cli.output import progress
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.listener import check_certificate
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineDied, InvalidConfig
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
        typer.Option(metavar="HOST", help="Host name to print in place of the one listened on.", show_default=False),
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

    Prints the endpoint, the key and the certificate's fingerprint once the engine is ready. Ends at SIGTERM or Ctrl-C;
    then the engine ends too.
    """
    key = _key(key_file)
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
    loop = asyncio.get_running_loop()
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    try:
        with progress(f"starting {engine.config.backend}") as report:
            await _unless(told_to_end, engine.start(report))
        if told_to_end.is_set():
            return
        # As a host process does: a full collection would scan the objects of the start again and again.
        gc.collect()
        gc.freeze()
        _print(await engine.handle(listen, key=key, announce=announce, **certificate), shows_key=key is None)
        await _unless(told_to_end, _failed(engine))
    finally:
        await engine.teardown()


async def _unless(told_to_end: asyncio.Event, work: Coroutine[object, object, None]) -> None:
    """Run ``work``, and cancel it when this process is told to end."""
    working = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(told_to_end.wait())
    await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
    for task in (working, ending):
        task.cancel()
    done = await asyncio.gather(working, ending, return_exceptions=True)
    if isinstance(done[0], Exception):
        raise done[0]


async def _failed(engine: InferenceEngine) -> None:
    """Wait until the engine has failed.

    Raises:
        EngineDied: it has.
    """
    changed = asyncio.Event()
    engine.parts.controller.subscribe(changed.set)
    while engine.state is not EngineState.FAILED:
        await changed.wait()
        changed.clear()
    raise EngineDied(engine.status.describe())


def _print(handle: EngineHandle, *, shows_key: bool) -> None:
    lines = [f"endpoint: {handle.address}", *[f"key: {handle.key}"] * shows_key]
    if handle.ssl_fingerprint is not None:
        lines.append(f"fingerprint: {handle.ssl_fingerprint}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
