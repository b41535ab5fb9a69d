"""The host's end of a socket to a worker inside the engine: calls go past the engine's own queues and threads.

The host listens under a random name that it tells only the engine's process, which connects to it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from drivetrain.errors import DrivetrainError, EngineStartError
from drivetrain.process.rpc_client import RpcClient
from drivetrain.process.sockets_in_forks import keep_from_forks
from drivetrain.process.wire import Failure
from drivetrain.process.worker_calls import CallNotTaken

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of a socket's other end."""


class WorkerListener:
    """Listens for the engine's process, under one of Linux's abstract names, which leave nothing in the file system."""

    def __init__(self) -> None:
        self.name = f"drivetrain-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        self._socket.setblocking(False)
        keep_from_forks(self._socket)

    async def accept(self, lost: Callable[[], DrivetrainError], patience: float = 60.0) -> WorkerConnection:
        """Wait until the engine's process has connected.

        Args:
            lost: Makes the error of calls after the process is gone.
            patience: Seconds to wait.

        Raises:
            EngineStartError: it did not connect in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience):
                while True:
                    connected, _ = await loop.sock_accept(self._socket)
                    if _user_of(connected) == os.getuid():
                        break
                    connected.close()  # another user's process found the name in a list
        except TimeoutError as error:
            raise EngineStartError(
                f"the engine runs, but its process did not connect within {patience:g} s: drivetrain's plugin is not "
                "loaded there. Its log says which plugins are; drivetrain must be installed where the engine is"
            ) from error
        finally:
            self.close()
        _, connection = await loop.create_unix_connection(lambda: WorkerConnection(lost), sock=connected)
        return connection

    def close(self) -> None:
        """Stop listening, also in processes that were forked meanwhile."""
        with suppress(OSError):  # it may be closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WorkerConnection(RpcClient):
    """A connection to a worker. Made by :class:`WorkerListener`."""

    def __init__(self, lost: Callable[[], DrivetrainError]) -> None:
        super().__init__(lambda _: self.fail(lost))
        self._lost_error = lost

    def close(self) -> None:
        """Close the socket; waiters get the error of a worker that is gone."""
        self.fail(self._lost_error)
        self.abort()

    def _exception(self, message: Failure) -> Exception:
        if message.error == CallNotTaken.__name__:
            return CallNotTaken(message.message)
        return super()._exception(message)


def _user_of(connected: socket.socket) -> int:
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user
