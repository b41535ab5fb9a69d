"""A front-end: serves the public port and a private Unix socket until the engine's owner ends it, or is gone."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
from starlette.applications import Starlette

from drivetrain.attached.engine import AttachedEngine, attach
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError
from drivetrain.process.garbage_collection import steady_garbage_collection
from drivetrain.text.tokenizer import import_libraries_without_torch
from drivetrain.types.handle import EngineHandle
from drivetrain_serving.app import application
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.front_ends.calls import FRONT_END, OWNER, Caller, FrontEndCalls, answer
from drivetrain_serving.front_ends.front_end_engine import FrontEndEngine
from drivetrain_serving.front_ends.places import PassesOn, Places
from drivetrain_serving.http_layer.app_on_socket import AppOnSocket, listening_path
from drivetrain_serving.http_layer.request_records import log_to_stderr
from drivetrain_serving.other_processes import Counted, SessionFacts

_LOGGER: Final = logging.getLogger("drivetrain.serving")
_LOST_S: Final = 5.0
"""Seconds between attempts to attach again to a lost engine."""


class Settings(msgspec.Struct, frozen=True):
    """A front-end's part of the server, which it reads from standard input as one line of JSON."""

    index: int
    count: int
    """Number of front-ends."""
    folder: str
    """Folder of the processes' Unix sockets."""
    address: str
    """The engine's handle."""
    key: str
    config: str
    """The server's configuration, as JSON."""


def main() -> None:
    """Run a front-end; the arguments are the file descriptors of its three sockets.

    It may be started before the engine: it imports all, and waits to be told its part of the server.
    """
    import_libraries_without_torch()
    # A line, not all: processes that the engine forks hold the other end, too.
    told = sys.stdin.buffer.readline()
    if not told:
        return  # the owner has ended
    settings = msgspec.json.decode(told, type=Settings)
    port, called, owner = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    sys.exit(asyncio.run(_run(settings, port, called, owner)))


async def _run(settings: Settings, port: socket.socket, called: socket.socket, owner: socket.socket) -> int:
    config = ServerConfig.model_validate_json(settings.config)
    if config.log_requests:
        log_to_stderr()
    places = Places(Path(settings.folder), settings.count)
    handle = EngineHandle(settings.address, settings.key)
    engine = await attach(handle)
    served = FrontEndEngine(engine, config, await Caller.over(owner, OWNER, "the engine's owner"))
    app = application(served)
    # The private socket takes requests that other front-ends pass on; they are answered here.
    private = AppOnSocket(app, listening_path(places.front_end(settings.index)), config)
    passing = PassesOn(app, places, settings.index)
    public = AppOnSocket(passing, port, config, shared=True, counts=app.state.counts)
    await private.start()
    await public.start()
    with steady_garbage_collection(holds_model=False):
        gone = asyncio.Event()
        await answer(called, FRONT_END, FrontEnd(served, app, public), gone.set)
        ends = [asyncio.ensure_future(gone.wait()), asyncio.ensure_future(_detached(engine, handle))]
        (first, *_), _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for one in (public, private):
        await one.abort()
    await app.state.sessions.close()
    await engine.teardown()
    return 0 if first is ends[0] else 1


async def _detached(engine: AttachedEngine, handle: EngineHandle) -> None:
    """Wait until this process alone has lost the engine; one that has failed itself is answered with its errors."""
    changed = asyncio.Event()
    engine.parts.controller.subscribe(changed.set)
    while engine.state is not EngineState.FAILED:
        await changed.wait()
        changed.clear()
    while True:
        try:
            await (await attach(handle)).teardown()
        except DrivetrainError:
            await asyncio.sleep(_LOST_S)
        else:
            _LOGGER.error("a front-end lost the engine, which goes on: %s", engine.status.describe())
            return


class FrontEnd(FrontEndCalls):
    """Answers the owner's calls."""

    def __init__(self, served: FrontEndEngine, app: Starlette, public: AppOnSocket) -> None:
        self._served = served
        self._app = app
        self._public = public

    async def ready(self) -> None:
        return None

    async def drain(self) -> None:
        await self._public.close()

    async def counts(self) -> Counted:
        traffic = self._served.traffic
        return Counted(self._app.state.counts.by_route(), traffic.generated, traffic.per_second())

    async def sessions(self) -> list[SessionFacts]:
        facts: list[SessionFacts] = self._app.state.sessions.facts()
        return facts

    async def request_ids(self) -> list[str]:
        return list(self._served.generating)

    async def abort(self, request_id: str) -> None:
        for one in self._served.engine_ids(request_id):
            await self._served.engine.parts.in_flight.abort(one)

    async def abort_all(self) -> None:
        await self._served.engine.parts.in_flight.abort(None)
