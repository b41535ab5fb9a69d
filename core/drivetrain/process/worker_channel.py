"""A socket from a host to a process of its engine, for calls that bypass the engine's own queues and threads.

The host listens under a secret name, and the process connects. Questions go one way and answers the other, in frames of
:mod:`drivetrain.process.wire` whose first four bytes are the question's number.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from drivetrain.errors import DrivetrainError, EngineStartError
from drivetrain.process.wire import FRAME_LIMIT, FrameReader

_ENOUGH: Final = 64 * 1024
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group id of a socket's peer."""
_NUMBERS: Final = 2**32
_listening: Final[weakref.WeakSet[ChannelListener]] = weakref.WeakSet()


class ChannelListener:
    """Listens for a process of the engine, under an abstract Linux socket name, which leaves no file behind."""

    def __init__(self) -> None:
        self.name = f"drivetrain-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        self._socket.setblocking(False)
        _listening.add(self)

    async def accept(self, lost: Callable[[], DrivetrainError], patience: float = 60.0) -> Channel:
        """Wait until the engine's running process connects.

        Args:
            lost: Makes the error for calls once the process is gone.
            patience: Timeout in seconds.

        Raises:
            EngineStartError: The process did not connect in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience):
                while True:
                    connection, _ = await loop.sock_accept(self._socket)
                    if _user_of(connection) == os.getuid():
                        break
                    connection.close()  # another user, who found the name in a list of sockets
        except TimeoutError as error:
            raise EngineStartError(
                f"the engine runs, but its process did not connect within {patience:g} s: drivetrain's plugin is not "
                "loaded there. Its log says which plugins are; drivetrain must be installed where the engine is"
            ) from error
        finally:
            self.close()
        _, channel = await loop.create_unix_connection(lambda: Channel(lost), sock=connection)
        return channel

    def close(self) -> None:
        """Stop listening, also in processes that were forked meanwhile."""
        with suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_copy(self) -> None:
        """Close this forked process's copy of the socket; the parent goes on listening."""
        self._socket.close()


def _close_listeners() -> None:
    for listener in list(_listening):
        listener.close_copy()


# A forked process would otherwise go on listening after the host has stopped.
os.register_at_fork(after_in_child=_close_listeners)


class Channel(asyncio.Protocol):
    """The host's end of a channel. Made by :class:`ChannelListener`."""

    def __init__(self, lost: Callable[[], DrivetrainError]) -> None:
        self._lost = lost
        self._frames = FrameReader(FRAME_LIMIT)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._transport: asyncio.Transport | None = None

    async def ask(self, question: bytes) -> bytes:
        """Send a question and wait for its answer.

        Raises:
            DrivetrainError: The process is gone, or the channel is closed.
        """
        if self._transport is None:
            raise self._lost()
        number = next(self._numbers) % _NUMBERS
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(_frame(number, question))
        return await answer

    def close(self) -> None:
        """Close the channel; pending questions fail with the error of a lost process."""
        if self._transport is not None:
            self._transport.abort()
            self.connection_lost(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            answer = self._waiting.pop(int.from_bytes(payload[:4], "little"))
            if not answer.done():
                answer.set_result(bytes(payload[4:]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(self._lost())


@dataclass(frozen=True, slots=True)
class Asked:
    """A received question."""

    number: int
    question: bytes


class AnswerChannel:
    """The engine process's end of a channel. Only one thread may receive."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        self._frames = FrameReader(FRAME_LIMIT)
        self.open = True
        """False once the host is gone."""

    def fileno(self) -> int:
        """Return the file descriptor, for ``select`` and the like."""
        return self._socket.fileno()

    def receive(self, *, wait: bool) -> list[Asked]:
        """Return the received questions. The list may be empty without ``wait``, or once the host is gone."""
        while self.open:
            try:
                data = self._socket.recv(_ENOUGH, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.open = False
            asked = [
                Asked(int.from_bytes(payload[:4], "little"), bytes(payload[4:])) for payload in self._frames.feed(data)
            ]
            if asked:
                return asked
        return []

    def answer(self, asked: Asked, answer: bytes) -> None:
        """Answer a question. Only one thread may answer at a time."""
        try:
            self._socket.sendall(_frame(asked.number, answer))
        except OSError:
            self.open = False  # the host is gone, and the engine soon will be

    def close(self) -> None:
        """Close the channel."""
        self.open = False
        self._socket.close()


def _frame(number: int, payload: bytes) -> bytes:
    return b"".join(((len(payload) + 4).to_bytes(4, "little"), number.to_bytes(4, "little"), payload))


def _user_of(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user
