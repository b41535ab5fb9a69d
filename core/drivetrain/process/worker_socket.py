"""The worker's end of its socket to the host: blocking reads and writes, for an engine's own loop or thread."""

from __future__ import annotations

import socket
from typing import Final

from drivetrain.process.wire import FRAME_LIMIT, Call, FrameReader, from_trainer, read

_READ_SIZE: Final = 64 * 1024


class WorkerSocket:
    """Connects to the host. One thread receives, one at a time replies.

    Args:
        name: The name under which :class:`~drivetrain.process.worker_connection.WorkerListener` listens.
    """

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        self._frames = FrameReader(FRAME_LIMIT)
        self.open = True
        """True while the host is connected."""

    def fileno(self) -> int:
        """File descriptor, so that an engine's loop can wait for calls beside its own sockets."""
        return self._socket.fileno()

    def receive(self, *, wait: bool) -> list[bytes]:
        """Return the calls that have arrived, each a payload for :meth:`WorkerMethods.read`.

        Args:
            wait: Block until there is one. The list is empty all the same once the host is gone.
        """
        while self.open:
            try:
                data = self._socket.recv(_READ_SIZE, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.open = False
            # Other messages are cancellations: a call here lasts no longer than a step of the batch.
            calls = [
                bytes(payload) for payload in self._frames.feed(data) if isinstance(read(from_trainer, payload), Call)
            ]
            if calls:
                return calls
        return []

    def reply(self, payload: bytes) -> None:
        """Send the answer to a call, as :meth:`WorkerMethods.serve` returns it. Not thread-safe."""
        try:
            self._socket.sendall(b"".join((len(payload).to_bytes(4, "little"), payload)))
        except OSError:
            self.open = False  # the host is gone, and the engine is about to end

    def close(self) -> None:
        """Disconnect from the host."""
        self.open = False
        self._socket.close()
