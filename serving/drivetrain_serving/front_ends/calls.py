"""Calls between the engine's owner and a front-end, over sockets that the front-end inherits."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from drivetrain.errors import ConnectionLost
from drivetrain.process.rpc_client import RpcClient
from drivetrain.process.rpc_methods import Method, method_table
from drivetrain.process.rpc_server import RpcServer
from drivetrain.process.wire import FRAME_LIMIT, Call
from drivetrain_serving.other_processes import Counted, SessionFacts


class FrontEndCalls(ABC):
    """One front-end, as the owner calls it."""

    @abstractmethod
    async def ready(self) -> None:
        """Return once the front-end serves."""

    @abstractmethod
    async def drain(self) -> None:
        """Accept no more connections, and return when requests in flight have ended."""

    @abstractmethod
    async def counts(self) -> Counted:
        """Return the numbers of this process."""

    @abstractmethod
    async def sessions(self) -> list[SessionFacts]:
        """Return the recorded sessions."""

    @abstractmethod
    async def request_ids(self) -> list[str]:
        """Return the ids of SGLang's requests in flight."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End one request of this front-end."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End every request of this front-end."""


class OwnerCalls(ABC):
    """The engine's owner, as a front-end calls it."""

    @abstractmethod
    async def load_adapter(self, name: str) -> None:
        """Return once an adapter is loaded that requests may name.

        Raises:
            DrivetrainError: It cannot be loaded.
        """


FRONT_END: Final = method_table(FrontEndCalls)
OWNER: Final = method_table(OwnerCalls)


class Answers(RpcServer):
    """Answers the calls of the process at the other end of a socket.

    Args:
        methods: The calls.
        target: Answers them.
        gone: Called when the other process has ended.
    """

    def __init__(
        self, methods: Mapping[str, Method], target: FrontEndCalls | OwnerCalls, gone: Callable[[], None]
    ) -> None:
        super().__init__(methods, FRAME_LIMIT)
        self._answering = target
        self._gone = gone

    def _target(self, call: Call) -> FrontEndCalls | OwnerCalls:
        return self._answering

    def _ended(self, code: int) -> None:
        self._gone()


async def answer(
    connected: socket.socket,
    methods: Mapping[str, Method],
    target: FrontEndCalls | OwnerCalls,
    gone: Callable[[], None] = lambda: None,
) -> asyncio.BaseTransport:
    """Answer calls that come from a socket."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(lambda: Answers(methods, target, gone), connected)
    return transport


class Caller:
    """Calls the process at the other end of a socket.

    Args:
        client: The connection.
        connected: Its socket.
        methods: The calls.
        who: Names the other process in errors.
    """

    def __init__(self, client: RpcClient, connected: socket.socket, methods: Mapping[str, Method], who: str) -> None:
        self._client = client
        self._connected = connected
        self._methods = methods
        self._who = who

    @classmethod
    async def over(cls, connected: socket.socket, methods: Mapping[str, Method], who: str) -> Caller:
        """Return a caller over a socket."""

        def lost(reason: str) -> None:
            client.fail(partial(ConnectionLost, f"{who} {reason}"))

        loop = asyncio.get_running_loop()
        _, client = await loop.connect_accepted_socket(lambda: RpcClient(lost), connected)
        return cls(client, connected, methods, who)

    async def call(self, name: str, *arguments: object) -> object:
        """Call a method.

        Raises:
            ConnectionLost: the other process has ended.
            DrivetrainError: the method raised it.
        """
        return await self._client.call(self._methods[name], arguments)

    def close(self) -> None:
        """Close the socket, by which the other process knows that this one needs it no more."""
        self._client.fail(partial(ConnectionLost, f"{self._who} was ended"))
        with suppress(OSError):  # the other process has closed it
            self._connected.shutdown(socket.SHUT_RDWR)  # processes that the engine forked may hold the socket, too
        self._client.close()
