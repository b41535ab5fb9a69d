"""A socket from a host to a process of its engine: calls go past the engine's own queues and threads.

The host listens under a name that nobody else is told, and the process connects. Questions go one way and answers the
other, in frames of :mod:`drivetrain.process.wire` whose first four bytes say which question it is, or is answered.
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
"""Process, user and group of a socket's other end."""
_NUMBERS: Final = 2**32
_listening: Final[weakref.WeakSet[ChannelListener]] = weakref.WeakSet()


class ChannelListener:
    """Where a process will connect. Of Linux's abstract names, which leave nothing in the file system."""

    def __init__(self) -> None:
        self.name = f"drivetrain-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        self._socket.setblocking(False)
        _listening.add(self)

    async def accept(self, lost: Callable[[], DrivetrainError], patience: float = 60.0) -> Channel:
        """Wait for the process, which runs; ``lost`` makes the error of who asks when it is gone.

        Raises:
            EngineStartError: it did not connect within ``patience`` seconds.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience):
                while True:
                    connection, _ = await loop.sock_accept(self._socket)
                    if _user_of(connection) == os.getuid():
                        break
                    connection.close()  # whoever it is, it found the name in a list
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
        """Listen no more, nor let a process that was forked meanwhile."""
        with suppress(OSError):  # it may be closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_copy(self) -> None:
        """Close this process's copy: the process that it was forked from goes on listening."""
        self._socket.close()


def _close_listeners() -> None:
    for listener in list(_listening):
        listener.close_copy()


# A forked process would go on listening after the host has stopped.
os.register_at_fork(after_in_child=_close_listeners)


class Channel(asyncio.Protocol):
    """The host's end. Made by :class:`ChannelListener`."""

    def __init__(self, lost: Callable[[], DrivetrainError]) -> None:
        self._lost = lost
        self._frames = FrameReader(FRAME_LIMIT)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._transport: asyncio.Transport | None = None

    async def ask(self, question: bytes) -> bytes:
        """Send a question and wait for its answer.

        Raises:
            DrivetrainError: the process is gone, or the channel closed.
        """
        if self._transport is None:
            raise self._lost()
        number = next(self._numbers) % _NUMBERS
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(_frame(number, question))
        return await answer

    def close(self) -> None:
        """Let go of the process; whoever waits gets the error of one that is gone."""
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
    """A question that came."""

    number: int
    question: bytes


class AnswerChannel:
    """The end of the engine's process. One thread receives."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        self._frames = FrameReader(FRAME_LIMIT)
        self.open = True
        """Whether the host is there."""

    def fileno(self) -> int:
        """For those that wait for several things at once."""
        return self._socket.fileno()

    def receive(self, *, wait: bool) -> list[Asked]:
        """Questions that have come. There may be none unless ``wait``, and are none once the host is gone."""
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
        """Answer a question. From one thread at a time."""
        try:
            self._socket.sendall(_frame(asked.number, answer))
        except OSError:
            self.open = False  # who asked is gone, and the engine will be

    def close(self) -> None:
        """Let go of the host."""
        self.open = False
        self._socket.close()


def _frame(number: int, payload: bytes) -> bytes:
    return b"".join(((len(payload) + 4).to_bytes(4, "little"), number.to_bytes(4, "little"), payload))


def _user_of(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user
