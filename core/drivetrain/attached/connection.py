"""A holder's end of the socket to an engine's owner: the handshake and the engine's state, on top of calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.shared_state import FACTS, STATE, EngineFacts, SharedState
from drivetrain.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DrivetrainError,
    EngineStateError,
    InvalidConfig,
    TlsError,
    WireError,
)
from drivetrain.process.handshake import check_version, drivetrain_version
from drivetrain.process.proof import new_nonce, proof, proves
from drivetrain.process.pulse import Pulse
from drivetrain.process.rpc_client import RpcClient
from drivetrain.process.tls import check_fingerprint, client_context, tls_error
from drivetrain.process.wire import (
    FRAME_LIMIT,
    HANDSHAKE_LIMIT,
    WIRE_VERSION,
    Attach,
    Attached,
    Failure,
    FrameReader,
    FromHost,
    Hello,
    State,
    frame,
    from_host,
    read,
)
from drivetrain.process.wire_errors import exception
from drivetrain.types.handle import EngineHandle


class OwnerConnection(RpcClient):
    """A connection to the owner of an engine.

    Args:
        on_state: Called with each change of the engine's state.
        on_lost: As for :class:`RpcClient`.
        check: Called with the transport once it is connected; may refuse the other side's certificate.
    """

    def __init__(
        self,
        key: str,
        on_state: Callable[[SharedState], None],
        on_lost: Callable[[str], None],
        check: Callable[[asyncio.BaseTransport], None] = lambda transport: None,
    ) -> None:
        super().__init__(on_lost, HANDSHAKE_LIMIT)
        self._key = key
        self._check = check
        self._nonce = new_nonce()
        self._their_nonce = b""
        self._on_state = on_state
        self.attached: asyncio.Future[Attached] = self._loop.create_future()
        # A connect that is cancelled before it waits for the future would leave its error to asyncio's log.
        self.attached.add_done_callback(lambda attached: attached.cancelled() or attached.exception())

    def fail(self, error: Callable[[], DrivetrainError]) -> None:
        super().fail(error)
        if not self.attached.done():
            self.attached.set_exception(error())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        try:
            self._check(transport)
        except TlsError as error:
            message = str(error)
            self.fail(lambda: TlsError(message))
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self.refusal is None:
            super().data_received(data)

    def _take(self, message: FromHost) -> None:
        if isinstance(message, Hello):
            check_version("the engine's owner", message.wire_version, message.drivetrain)
            self._their_nonce = message.nonce
            self._send(attach_message(self._key, message.nonce, self._nonce, 0))
        elif isinstance(message, Attached):
            if not proves(message.proof, self._key, "owner", self._nonce, self._their_nonce):
                raise WireError("what answers at the handle's address does not know its key")
            self._frames.limit = FRAME_LIMIT
            self._on_state(cast(SharedState, STATE.decode(message.state)))
            if not self.attached.done():
                self.attached.set_result(message)
        elif isinstance(message, State):
            self._on_state(cast(SharedState, STATE.decode(message.state)))
        else:
            super()._take(message)


def attach_message(key: str, their_nonce: bytes, nonce: bytes, pulse_of: int) -> Attach:
    """Make the answer to a listener's ``Hello``."""
    name = f"process {os.getpid()} of {socket.gethostname()}"
    proof_ = proof(key, "holder", their_nonce, nonce)
    return Attach(WIRE_VERSION, drivetrain_version(), nonce, proof_, pulse_of, name)


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection to an engine's owner, with its pulse."""

    connection: OwnerConnection
    facts: EngineFacts
    pulse: Pulse

    async def close(self) -> None:
        """Close the connection and end the pulse."""
        self.connection.close()
        await asyncio.sleep(0)  # closes the socket; the owner would report a pulse that ends before it
        await asyncio.to_thread(self.pulse.stop)


async def connect(
    handle: EngineHandle,
    on_state: Callable[[SharedState], None],
    on_lost: Callable[[str], None],
    patience: float,
) -> Connected:
    """Connect to an engine's owner.

    Args:
        handle: The engine's address and key.
        on_state: Called with the engine's state, now and at each change.
        on_lost: Called in the event loop with the reason when the connection breaks or the pulse stops.
        patience: Seconds to connect within.

    Raises:
        EngineDied: The engine died.
        EngineStateError: No engine listens at the address, or the engine is not open.
        WireError: The key is wrong, or the owner speaks another version.
        TlsError: Its certificate is refused, or only one of the two sides speaks TLS.
        InvalidConfig: The file of the handle's ``ssl_ca_certs`` cannot be read.
        ConnectionLost: The connection broke during the handshake.
        DeadlineExceeded: The owner does not answer within ``patience`` seconds.
    """
    loop = asyncio.get_running_loop()

    def lost(reason: str) -> None:
        if not connection.attached.done():
            connection.fail(partial(ConnectionLost, f"the owner of the engine at {handle.address} {reason}"))
        on_lost(reason)

    def check(transport: asyncio.BaseTransport) -> None:
        if handle.is_tls:
            peer = transport.get_extra_info("ssl_object")
            check_fingerprint(handle.ssl_fingerprint, peer.getpeercert(True), handle.address)

    connection = OwnerConnection(handle.key, on_state, lost, check)
    async with deadline(patience, f"the engine at {handle.address} to answer"):
        try:
            if handle.path is not None:
                await loop.create_unix_connection(lambda: connection, handle.path)
            else:
                context = await asyncio.to_thread(_context, handle)
                await loop.create_connection(lambda: connection, *handle.tcp, ssl=context)
        except InvalidConfig:
            raise
        except (OSError, ValueError) as error:  # ValueError: no path or host name at all
            raise _not_connected(handle, error) from error
        try:
            attached = await connection.attached
            facts = cast(EngineFacts, FACTS.decode(attached.description))
            pulse_socket = await asyncio.to_thread(_pulse_socket, handle, attached.holder, patience)
        except BaseException:
            connection.abort()
            raise

    def pulse_lost(reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(on_lost, reason)

    heartbeat = facts.config.timeouts.heartbeat
    pulse = Pulse(pulse_socket, min(1.0, heartbeat / 4), heartbeat, pulse_lost)
    pulse.start()
    return Connected(connection, facts, pulse)


def nothing_listens(handle: EngineHandle, error: Exception) -> EngineStateError:
    """Make the error of an address at which no connection was made."""
    return EngineStateError(
        f"no engine listens at {handle.address}: {error}; it was closed, or its owner has ended", state="closed"
    )


def _not_connected(handle: EngineHandle, error: Exception) -> DrivetrainError:
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError):
        return _broke(handle, error)
    if isinstance(error, ssl.SSLError):
        return tls_error(error, handle.address)
    return nothing_listens(handle, error)


def _context(handle: EngineHandle) -> ssl.SSLContext | None:
    return client_context(handle.ssl_ca_certs, handle.ssl_fingerprint) if handle.is_tls else None


def fetch_facts(handle: EngineHandle, patience: float) -> EngineFacts:
    """Fetch the description of an engine from its owner, and disconnect. Blocks.

    Raises:
        DrivetrainError: as for :func:`connect`.
    """
    nonce = new_nonce()
    try:
        with _open(handle, patience) as connected:
            hello = _hello(connected, handle)
            connected.sendall(b"".join(frame(attach_message(handle.key, hello.nonce, nonce, 0))))
            attached = _receive(connected, Attached, handle)
    except TimeoutError:
        waited = f"timed out after {patience:g} s waiting for the engine at {handle.address} to answer"
        hint = "; if its owner runs in this event loop, which waits here, use 'await attach(handle)'" * _in_a_loop()
        raise DeadlineExceeded(waited + hint) from None
    except OSError as error:
        raise _broke(handle, error) from error
    if not proves(attached.proof, handle.key, "owner", nonce, hello.nonce):
        raise WireError("what answers at the handle's address does not know its key")
    return cast(EngineFacts, FACTS.decode(attached.description))


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _open(handle: EngineHandle, patience: float) -> socket.socket:
    try:
        if handle.path is None:
            return _encrypted(socket.create_connection(handle.tcp, timeout=patience), handle)
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(patience)
            connected.connect(handle.path)
        except BaseException:
            connected.close()
            raise
    except (TimeoutError, InvalidConfig):
        raise
    except (OSError, ValueError) as error:
        raise _not_connected(handle, error) from error
    return connected


def _encrypted(connected: socket.socket, handle: EngineHandle) -> socket.socket:
    try:
        context = _context(handle)
        if context is None:
            return connected
        encrypted = context.wrap_socket(connected, server_hostname=handle.tcp[0])
    except BaseException:
        connected.close()
        raise
    try:
        check_fingerprint(handle.ssl_fingerprint, encrypted.getpeercert(True), handle.address)
    except BaseException:
        encrypted.close()
        raise
    return encrypted


_M = TypeVar("_M", Hello, Attached)


def _hello(connected: socket.socket, handle: EngineHandle) -> Hello:
    hello = _receive(connected, Hello, handle)
    check_version("the engine's owner", hello.wire_version, hello.drivetrain)
    return hello


def _receive(connected: socket.socket, expected: type[_M], handle: EngineHandle) -> _M:
    """Read one message from a blocking socket."""
    frames = FrameReader(HANDSHAKE_LIMIT)
    while not (payloads := frames.feed(received := connected.recv(1 << 16))):
        if not received:
            raise ConnectionLost(f"the owner of the engine at {handle.address} closed the connection at once")
    message = read(from_host, payloads[0])
    if isinstance(message, Failure):
        raise exception(message)
    if not isinstance(message, expected):
        raise WireError(f"a {type(message).__name__} came where a {expected.__name__} is expected")
    return message


def _broke(handle: EngineHandle, error: OSError) -> ConnectionLost:
    return ConnectionLost(f"the connection to the engine at {handle.address} broke during the handshake: {error}")


def _pulse_socket(handle: EngineHandle, holder: int, patience: float) -> socket.socket:
    """Connect a second socket, and let it be this holder's pulse."""
    try:
        connected = _open(handle, patience)
        try:
            hello = _hello(connected, handle)
            connected.sendall(b"".join(frame(attach_message(handle.key, hello.nonce, new_nonce(), holder))))
        except BaseException:
            connected.close()
            raise
    except OSError as error:
        raise _broke(handle, error) from error
    return connected
