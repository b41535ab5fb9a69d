"""An ASGI application on a socket: uvicorn in the running event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from drivetrain.errors import InvalidConfig
from drivetrain.process.sockets_in_forks import keep_from_forks
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.connections import protocol_of
from drivetrain_serving.http_layer.request_counts import RequestCounts
from drivetrain_serving.http_layer.request_targets import TakesAbsoluteTargets
from drivetrain_serving.http_layer.unread_bodies import ClosesUnlessContinued

_BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""


class _Announcing(uvicorn.Server):
    """Says when it has begun to serve, and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AppOnSocket:
    """Serves an application on a listening socket, which it closes at the end.

    Args:
        app: The application.
        listening: The socket.
        config: The server's bounds.
        shared: Other processes accept on this socket, too: leave them their part of many connections at once.
        counts: Counts the requests that do not reach the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        config: ServerConfig,
        *,
        shared: bool = False,
        counts: RequestCounts | None = None,
    ) -> None:
        self._socket = listening
        self._server = _Announcing(
            uvicorn.Config(
                ClosesUnlessContinued(TakesAbsoluteTargets(app)),
                lifespan="off",
                http=protocol_of(config, counts, to_front_ends=listening.family is socket.AF_UNIX),
                ws="none",  # no route is a websocket
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=1 if shared else _BACKLOG,  # also how many connections asyncio accepts at one wake-up
                timeout_keep_alive=config.keep_alive_timeout,
                timeout_graceful_shutdown=round(config.shutdown_timeout),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve from now on."""
        self._serving = asyncio.ensure_future(self._server.serve([self._socket]))
        listening = asyncio.ensure_future(self._server.listens.wait())
        try:
            await asyncio.wait([listening, self._serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if self._serving.done():
            self._serving.result()
        self._socket.listen(_BACKLOG)

    async def close(self) -> None:
        """Accept no more connections, let requests in flight end, and stop."""
        self._server.should_exit = True
        if self._serving is None:
            self._socket.close()
        else:
            await asyncio.shield(self._serving)

    async def abort(self) -> None:
        """Stop without waiting for requests in flight."""
        self._server.force_exit = True
        await self.close()


def listening_port(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound to the configured address. It refuses connections until :func:`listen`.

    Raises:
        InvalidConfig: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; else an answer waits 40 ms for the ACK of its headers.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise _taken(config, error) from error
    listening.set_inheritable(False)
    keep_from_forks(listening)
    return listening


def listen(bound: socket.socket, config: ServerConfig) -> None:
    """Listen on the socket of :func:`listening_port`.

    Raises:
        InvalidConfig: another process bound the port before this one listened, and listens there.
    """
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _taken(config, error) from error


def _taken(config: ServerConfig, error: Exception) -> InvalidConfig:
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL):
        return InvalidConfig(
            f"host={config.host!r}: cannot listen there: {error}; give an address of this machine", field="host"
        )
    return InvalidConfig(
        f"port={config.port}: cannot listen on {config.host}: {error}; choose another port", field="port"
    )


def listening_path(path: Path) -> socket.socket:
    """Return a Unix socket that is bound to a path, in the place of one that a killed process left there.

    Raises:
        InvalidConfig: the path cannot be listened on.
    """
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    keep_from_forks(listening)
    try:
        listening.bind(str(path))
    except OSError as error:  # e.g. the path is too long
        listening.close()
        raise InvalidConfig(
            f"cannot listen on {path}: {error}; set TMPDIR to another folder", field="processes"
        ) from error
    return listening
