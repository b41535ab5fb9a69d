"""The application on a port: uvicorn in the event loop of the engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import uvicorn

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain_serving.app import create_app
from drivetrain_serving.config import ServerConfig

_KEEP_ALIVE_S: Final = 75
"""Seconds that an idle connection stays open: clients that keep connections take 5 s or more for granted."""


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


class Server:
    """Serves an engine by HTTP, in the event loop that starts it, until it is closed.

    Args:
        engine: A started engine, or a fleet. The server does not close it.
        config: Address, names, keys and bounds.
    """

    def __init__(self, engine: InferenceEngine, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self._app = create_app(engine, self.config)
        self._server = _Announcing(
            uvicorn.Config(
                self._app,
                lifespan="off",
                http="h11",  # httptools limits no headers
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(self.config.shutdown_timeout),
            )
        )
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address, such as ``http://127.0.0.1:8000``."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            InvalidConfig: the address cannot be listened on.
        """
        self._socket = _listening(self.config)
        self._serving = asyncio.ensure_future(self._server.serve([self._socket]))
        listening = asyncio.ensure_future(self._server.listens.wait())
        try:
            await asyncio.wait([listening, self._serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if self._serving.done():
            self._serving.result()

    async def close(self) -> None:
        """Take no more requests, give those in flight ``shutdown_timeout`` to end, and stop."""
        self._server.should_exit = True
        try:
            if self._serving is not None:
                await self._serving
        finally:
            await self._app.state.weight_groups.close()
            await self._app.state.sessions.close()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()


def _listening(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; else an answer waits 40 ms for the ACK of its headers.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidConfig(
            f"port={config.port}: cannot listen on {config.host}: {error}; choose another port", field="port"
        ) from error
    listening.set_inheritable(False)
    return listening
