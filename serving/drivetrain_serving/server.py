"""The application on a port: in the event loop of the engine, or with front-ends before it."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from drivetrain.engine.engine import InferenceEngine
from drivetrain_serving.app import create_app
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.front_ends.supervision import FrontEnds
from drivetrain_serving.http_layer.app_on_socket import AppOnSocket, listen, listening_port


class Listening:
    """A server's port and its front-ends, which start beside the engine.

    Args:
        config: The server's configuration.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.port = listening_port(config)
        self.front_ends = FrontEnds(config, self.port) if config.processes > 1 else None

    async def __aenter__(self) -> Self:
        """Start the front-ends' processes, and do not wait for them."""
        try:
            if self.front_ends is not None:
                await self.front_ends.begin()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """End the front-ends, and leave the port."""
        if self.front_ends is not None:
            await self.front_ends.close()
        self.port.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()


class Server:
    """Serves an engine by HTTP, in the event loop that starts it, until it is closed.

    With ``processes`` above 1, as many front-end processes accept on the port. They answer the routes that generate,
    and pass the others on to the application in this process, which listens on a Unix socket.

    Args:
        engine: A started engine, or a fleet. The server does not close it.
        config: Address, names, keys and bounds.
        listening: The port and the front-ends of this configuration, if they began before the engine was started.
    """

    def __init__(
        self, engine: InferenceEngine, config: ServerConfig | None = None, *, listening: Listening | None = None
    ) -> None:
        self.config = config or ServerConfig()
        self._listening = listening
        self._app = create_app(engine, self.config)
        self._socket: socket.socket | None = None
        self._ends = AsyncExitStack()
        self._ends.push_async_callback(self._app.state.sessions.close)
        self._ends.push_async_callback(self._app.state.sent_adapters.close)
        self._ends.push_async_callback(self._app.state.weight_groups.close)

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
            EngineStartError: a front-end did not start.
        """
        listening = self._listening or Listening(self.config)
        self._socket = listening.port
        try:
            if listening.front_ends is not None:
                self._ends.push_async_callback(listening.front_ends.close)
                listen(listening.port, self.config)
                await listening.front_ends.start(self._app)
            else:
                serving = AppOnSocket(self._app, listening.port, self.config, counts=self._app.state.counts)
                self._ends.push_async_callback(serving.close)
                listen(listening.port, self.config)
                await serving.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Take no more requests, give those in flight ``shutdown_timeout`` to end, and stop."""
        await self._ends.aclose()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()
