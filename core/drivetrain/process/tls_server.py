"""The owner's end of a TLS connection.

asyncio's own TLS transport cannot give its connection to a thread, as pulses need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from typing import Final, cast

from drivetrain.errors import TlsError
from drivetrain.process.sockets_in_forks import keep_from_forks
from drivetrain.process.wire import frame
from drivetrain.process.wire_errors import failure

_logger = logging.getLogger("drivetrain.engine")

SILENT_S: Final = 5.0
"""Seconds in which the other side must begin the handshake."""
_HANDSHAKE: Final = 0x16
"""First byte of a TLS connection."""
_CHUNK: Final = 1 << 18


class TlsServer(asyncio.Protocol, asyncio.Transport):
    """Decrypts between a socket's transport and a protocol, whose transport this is.

    Args:
        context: The owner's certificate and key.
        inner: The protocol. It is connected at once; its writes are sent after the handshake.
    """

    def __init__(self, context: ssl.SSLContext, inner: asyncio.Protocol) -> None:
        super().__init__()
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._unsent: list[bytes] = []
        self._begun = self._ready = self._detached = False

    # The socket ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_from_forks(transport)
        self._raw = cast(asyncio.Transport, transport)
        self._silence = asyncio.get_running_loop().call_later(SILENT_S, self._refuse_plain)
        self._inner.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._silence.cancel()
            if data[0] != _HANDSHAKE:
                self._refuse_plain()
                return
        self._incoming.write(data)
        try:
            if not self._ready:
                self._tls.do_handshake()
                self._ready = True
                for unsent in self._unsent:
                    self._encrypt(unsent)
                self._unsent.clear()
            while not self._detached and not self._raw.is_closing():
                received = self._tls.read(_CHUNK)
                if not received:
                    self.close()
                    return
                self._inner.data_received(received)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            _logger.warning("a TLS connection to this engine failed: %s", error)
            self._flush()
            self._raw.close()
            return
        if not self._detached:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        self._inner.connection_lost(exc)

    def _refuse_plain(self) -> None:
        """Tell a client that does not speak TLS, in plain text."""
        words = "this engine listens with TLS; use the tls:// address and the certificate that its owner printed"
        self._raw.write(b"".join(frame(failure(0, TlsError(words)))))
        self._raw.close()

    def _encrypt(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            self._tls.write(view[start : start + _CHUNK])
            self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())

    # The protocol's transport ----------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ready:
            self._encrypt(bytes(data))
        else:
            self._unsent.append(bytes(data))

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def close(self) -> None:
        if self._ready and not self._detached:
            with contextlib.suppress(ssl.SSLError):  # do not wait for the other side's close
                self._tls.unwrap()
            self._flush()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def detach(self) -> TlsSocket:
        """Hand the connection to a thread; the event loop stops reading and writing it."""
        self._detached = True
        self._flush()
        raw = self._raw.get_extra_info("socket")
        taken = socket.socket(fileno=os.dup(raw.fileno()))
        keep_from_forks(taken)
        self._raw.pause_reading()
        self._raw.abort()  # closes asyncio's descriptor; ours stays
        return TlsSocket(taken, self._tls, self._incoming, self._outgoing)


class TlsSocket:
    """A connection that was encrypted by a :class:`TlsServer`, with the calls of a non-blocking socket."""

    def __init__(
        self, raw: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        self._raw = raw
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._unsent = b""
        raw.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._raw.fileno()

    def recv(self, most: int) -> bytes:
        """Return bytes, or none if the other side has closed.

        Raises:
            BlockingIOError: No bytes have come.
        """
        while True:
            try:
                return self._tls.read(most)
            except ssl.SSLWantReadError:
                received = self._raw.recv(most)
                if not received:
                    return b""
                self._incoming.write(received)

    def send(self, data: bytes) -> int:
        """Send bytes, now or with later ones.

        Raises:
            BlockingIOError: The other side does not read; nothing is queued.
        """
        if not self._unsent:
            self._tls.write(data)
            self._unsent = self._outgoing.read()
        self._unsent = self._unsent[self._raw.send(self._unsent) :]
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()
