"""The front-ends of a server, as the engine's owner starts, watches, asks and ends them."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

import msgspec
import psutil
from starlette.applications import Starlette

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import ConnectionLost, DeadlineExceeded, DrivetrainError, EngineStartError
from drivetrain.process.frozen import is_frozen
from drivetrain.process.sockets_in_forks import keep_from_forks
from drivetrain.types.handle import EngineHandle
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.front_ends.calls import FRONT_END, OWNER, Caller, OwnerCalls, answer
from drivetrain_serving.front_ends.front_end import Settings
from drivetrain_serving.front_ends.places import Places
from drivetrain_serving.http_layer.app_on_socket import AppOnSocket, listening_path
from drivetrain_serving.other_processes import Counted, OtherProcesses, SessionFacts
from drivetrain_serving.served_engine import ServedEngine

_LOGGER: Final = logging.getLogger("drivetrain.serving")
_FOLDER: Final = "drivetrain-serving-"
_STDERR: Final = 2
_START_S: Final = 300.0
"""Seconds in which a front-end must start: it imports the tokenizer's libraries, perhaps from a cold disk."""
_END_S: Final = 10.0
"""Seconds in which a front-end must end."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
_COUNT_S: Final = 5.0
"""Timeout in seconds for a front-end's counts; after it, the last ones are used."""
_STEADY_S: Final = 60.0
"""A front-end that lived for so many seconds is started again without a long pause."""


_LOOK_S: Final = 0.5
"""Seconds between looks at whether a front-end is stopped or frozen."""


class FrontEnds(OtherProcesses):
    """All front-ends of a server, and the application to which they pass requests on.

    It starts one that ends again, and kills one that is stopped or frozen for as long as the engine waits for a sign of
    life: the engine has given up its requests by then.

    Args:
        config: The server's configuration.
        port: The bound socket of the public port, on which the front-ends accept.
    """

    def __init__(self, config: ServerConfig, port: socket.socket) -> None:
        self._config = config
        self._port = port
        parent = Path(tempfile.gettempdir())
        remove_orphans(parent, _FOLDER)
        self._folder = OwnedFolder(parent, _FOLDER)
        self._serving: AppOnSocket | None = None
        self._served: ServedEngine | None = None
        count = config.processes
        self.places = Places(self._folder.path, count)
        self._each = [_FrontEnd(index, port) for index in range(count)]
        self._running: list[asyncio.Task[None]] = []
        self._closed = False

    async def begin(self) -> None:
        """Start the processes: they import their modules while the engine starts."""
        await gather_or_cancel(one.begin() for one in self._each)

    async def start(self, app: Starlette) -> None:
        """Let the processes serve, and start those that have not begun.

        Args:
            app: The application, which listens on a Unix socket.

        Raises:
            InvalidConfig: the folder for temporary files cannot hold Unix sockets.
            EngineStartError: one did not start.
        """
        served: ServedEngine = app.state.served
        self._served = served
        self._serving = AppOnSocket(app, listening_path(self.places.owner), self._config)
        await self._serving.start()
        handle = await served.engine.handle()
        settings = [self._settings(index, handle) for index in range(self.places.count)]
        owner, patience = _Owner(served), served.engine.config.timeouts.heartbeat
        await gather_or_cancel(
            one.start(msgspec.json.encode(its), owner, patience) for one, its in zip(self._each, settings, strict=True)
        )
        self._running = [asyncio.ensure_future(one.keep_running()) for one in self._each]
        served.others = self

    def _settings(self, index: int, handle: EngineHandle) -> Settings:
        config = _part_of(self._config, self.places.count).model_dump_json()
        return Settings(index, self.places.count, str(self.places.folder), handle.address, handle.key, config)

    async def close(self) -> None:
        """Let the processes accept no more requests, give requests in flight ``shutdown_timeout``, and end them."""
        if self._closed:
            return
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._port.close()
        patience = self._config.shutdown_timeout + _END_S
        # A front-end may wait for an answer of another one, so that all end before one is gone.
        await asyncio.gather(*(one.drain(patience) for one in self._each))
        await asyncio.gather(*(one.end() for one in self._each))
        if self._serving is not None:
            await self._serving.close()
        self._folder.remove_or_leave("the folder of the front-ends' sockets")

    # Other processes ---------------------------------------------------------------------------------------------

    async def counts(self) -> list[Counted]:
        return await asyncio.gather(*(one.counts() for one in self._each))

    async def sessions(self) -> list[SessionFacts]:
        answers = cast("list[list[SessionFacts]]", await self._of_each("sessions"))
        return [session for answer in answers for session in answer]

    async def request_ids(self) -> list[str]:
        return [one for answer in cast("list[list[str]]", await self._of_each("request_ids")) for one in answer]

    async def abort(self, request_id: str) -> None:
        await self._of_each("abort", request_id)

    async def abort_all(self) -> None:
        await self._of_each("abort_all")

    async def _of_each(self, name: str, *arguments: object) -> Sequence[object]:
        """Call every front-end that runs."""
        assert self._served is not None
        seconds = self._served.engine.config.timeouts.control
        async with deadline(seconds, f"the front-ends to answer {name}"):
            answers = await asyncio.gather(*(one.ask(name, *arguments) for one in self._each))
        return [answer for answer in answers if answer is not _GONE]


_GONE: Final = object()
"""Answer of a front-end that has ended."""


class _Owner(OwnerCalls):
    """Answers front-ends."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served

    async def load_adapter(self, name: str) -> None:
        await self._served.adapter_of(name)


class _FrontEnd:
    """One front-end: its process, and the next one when that has ended.

    Args:
        index: Its place among the front-ends.
        port: The socket on which it accepts.
    """

    def __init__(self, index: int, port: socket.socket) -> None:
        self._index = index
        self._port = port
        self._settings = b""
        self._owner: OwnerCalls | None = None
        self._patience = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._waiting: tuple[socket.socket, socket.socket] | None = None
        """Sockets of a process that has begun and waits for its settings."""
        self._caller: Caller | None = None
        self._watching: asyncio.Task[None] | None = None
        """Looks at whether the process is stopped, until it has ended or was killed."""
        self._before = Counted()
        """Last counts of the processes that have ended."""
        self._told = Counted()

    async def begin(self) -> None:
        """Start the process: it imports its modules and then waits."""
        called, called_there = socket.socketpair()
        calling, calling_there = socket.socketpair()
        self._waiting = (called, calling)
        for ours in self._waiting:
            keep_from_forks(ours)
        there = (self._port, called_there, calling_there)
        fds = [one.fileno() for one in there]
        command = (sys.executable, "-P", "-X", "faulthandler", "-m", "drivetrain_serving.front_ends", *map(str, fds))
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=_STDERR, pass_fds=fds, start_new_session=True
        )
        self._killed = False
        assert self._process.stdin is not None
        keep_from_forks(self._process.stdin.transport)
        called_there.close()
        calling_there.close()

    async def start(self, settings: bytes, owner: OwnerCalls, patience: float) -> None:
        """Let the process serve, and wait until it does.

        Args:
            settings: Its part of the server.
            owner: Answers its calls.
            patience: Seconds for which it may be stopped or frozen; then it is killed.

        Raises:
            EngineStartError: it ended, or took too long.
        """
        self._settings, self._owner, self._patience = settings, owner, patience
        if self._waiting is None:
            await self.begin()
        assert self._waiting is not None
        assert self._process is not None
        self._watching = asyncio.ensure_future(self._kill_if_stopped(self._process))
        called, calling = self._waiting
        self._waiting = None
        self._caller = await Caller.over(called, FRONT_END, f"front-end {self._index}")
        await answer(calling, OWNER, owner)
        try:
            async with deadline(_START_S, f"front-end {self._index} to start"):
                await self._tell(settings)
                await self._caller.call("ready")
        except (ConnectionLost, DeadlineExceeded) as error:
            await self.end()
            raise EngineStartError(f"front-end {self._index} did not start: {error}; its messages are above") from error

    async def _tell(self, settings: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended; the call that follows says so
            self._process.stdin.write(settings + b"\n")
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def keep_running(self) -> None:
        """Start the process again whenever it ends, after pauses that grow if it ends soon."""
        pause, began = _FIRST_PAUSE_S, time.monotonic()
        while True:
            assert self._process is not None
            _LOGGER.error(
                "front-end %d (process %d) %s; its requests and recorded sessions are lost, and it is started again",
                *(self._index, self._process.pid, await self._ended(self._process)),
            )
            self._forget()
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else min(4 * pause, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            began = time.monotonic()
            assert self._owner is not None
            try:
                await self.start(self._settings, self._owner, self._patience)
            except DrivetrainError as error:
                _LOGGER.error("%s", error)

    async def _ended(self, process: asyncio.subprocess.Process) -> str:
        """Wait until a process has ended, or was killed and the kernel does not end it; say which."""
        ending = asyncio.ensure_future(process.wait())
        try:
            if (watching := self._watching) is not None:
                await asyncio.wait([ending, watching], return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not watching.cancelled() and (error := watching.exception()) is not None:
                    _LOGGER.error(
                        "front-end %d (process %d) is no longer watched: looking at it failed",
                        *(self._index, process.pid),
                        exc_info=error,
                    )
            if self._killed:
                await asyncio.wait([ending], timeout=_END_S)
                if not ending.done():
                    return "was killed, and the kernel keeps it"
            return f"ended with status {await ending}"
        finally:
            ending.cancel()

    async def _kill_if_stopped(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process that is stopped or frozen, and so keeps its clients and other front-ends waiting."""
        stopped = 0.0
        with suppress(psutil.NoSuchProcess):  # it has ended
            looked_at = psutil.Process(process.pid)
            while stopped <= self._patience:
                await asyncio.sleep(_LOOK_S)
                # Looks are counted, and not the time: this process may have been stopped, too.
                stopped = stopped + _LOOK_S if is_frozen(looked_at) else 0.0
            _LOGGER.error(
                "front-end %d (process %d) has been stopped for %g s (timeouts.heartbeat of the engine) and is killed",
                *(self._index, process.pid, self._patience),
            )
            self._kill()

    def _forget(self) -> None:
        self._watch_no_more()
        if self._caller is not None:
            self._caller.close()
            self._caller = None
        self._before += Counted(self._told.answers, self._told.generated)
        self._told = Counted()

    # Calls -------------------------------------------------------------------------------------------------------

    async def ask(self, name: str, *arguments: object) -> object:
        """Call the process; ``_GONE`` if it has ended."""
        if self._caller is None:
            return _GONE
        try:
            return await self._caller.call(name, *arguments)
        except ConnectionLost:
            return _GONE

    async def counts(self) -> Counted:
        """Return the numbers of this process and of those before it."""
        try:
            async with deadline(_COUNT_S, f"the numbers of front-end {self._index}"):
                answer = await self.ask("counts")
        except DeadlineExceeded as error:
            _LOGGER.warning("%s", error)
        else:
            self._told = answer if isinstance(answer, Counted) else self._told
        return self._before + self._told

    # The end -----------------------------------------------------------------------------------------------------

    async def drain(self, patience: float) -> None:
        """Let the process accept no more connections, and wait until its requests have ended."""
        try:
            async with deadline(patience, f"front-end {self._index} to end its requests"):
                await self.ask("drain")
        except DeadlineExceeded as error:
            _LOGGER.warning("%s", error)

    async def end(self) -> None:
        """End the process; one that does not end in time is killed."""
        if self._waiting is not None:
            for one in self._waiting:
                one.close()
            self._waiting = None
            self._kill()  # a process that has no engine yet needs no clean end
        self._watch_no_more()
        if self._process is None:
            return
        if self._caller is not None:
            self._caller.close()
            self._caller = None
        if not await self._ends():
            _LOGGER.warning("front-end %d did not end within %g s and is killed", self._index, _END_S)
            self._kill()
            if not await self._ends():
                _LOGGER.error("the kernel does not end front-end %d (process %d)", self._index, self._process.pid)

    async def _ends(self) -> bool:
        assert self._process is not None
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _watch_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
                self._killed = True


def _part_of(config: ServerConfig, count: int) -> ServerConfig:
    """Return the configuration of one of ``count`` front-ends: each has its part of the bounds of recorded sessions."""
    sessions = config.sessions
    part = {name: -(-getattr(sessions, name) // count) for name in ("most_sessions", "memory_bytes", "disk_bytes")}
    return config.model_copy(update={"sessions": sessions.model_copy(update=part)})
