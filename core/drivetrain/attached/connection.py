"""A holder's end of the socket to an engine's owner: the handshake and the engine's state, on top of calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import cast

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.shared_state import FACTS, STATE, EngineFacts, SharedState
from drivetrain.errors import DrivetrainError, EngineDied, EngineStateError, WireError
from drivetrain.process.handshake import check_version, drivetrain_version
from drivetrain.process.proof import new_nonce, proof, proves
from drivetrain.process.pulse import Pulse
from drivetrain.process.rpc_client import RpcClient
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
    """

    def __init__(self, key: str, on_state: Callable[[SharedState], None], on_lost: Callable[[str], None]) -> None:
        super().__init__(on_lost, HANDSHAKE_LIMIT)
        self._key = key
        self._nonce = new_nonce()
        self._their_nonce = b""
        self._on_state = on_state
        self.attached: asyncio.Future[Attached] = self._loop.create_future()

    def fail(self, error: Callable[[], DrivetrainError]) -> None:
        super().fail(error)
        if not self.attached.done():
            self.attached.set_exception(error())

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


async def connect(
    handle: EngineHandle,
    on_state: Callable[[SharedState], None],
    on_lost: Callable[[str], None],
    patience: float,
) -> tuple[OwnerConnection, EngineFacts, Pulse]:
    """Connect to an engine's owner; return the connection, what the engine is, and the pulse.

    Raises:
        EngineStateError: Nothing listens there, or the engine is not open.
        WireError: The key is wrong, or the owner speaks another version.
        DeadlineExceeded: The owner does not answer within ``patience`` seconds.
    """
    loop = asyncio.get_running_loop()

    def make() -> OwnerConnection:
        return OwnerConnection(handle.key, on_state, on_lost)

    async with deadline(patience, f"the engine at {handle.address} to answer"):
        try:
            if handle.path is not None:
                _, connection = await loop.create_unix_connection(make, handle.path)
            else:
                _, connection = await loop.create_connection(make, *handle.tcp)
        except (OSError, ValueError) as error:  # ValueError: no path or host name at all
            raise EngineStateError(
                f"no engine listens at {handle.address}: {error}; it was closed, or its owner has ended",
                state="closed",
            ) from error
        try:
            attached = await connection.attached
            facts = cast(EngineFacts, FACTS.decode(attached.description))
            pulse_socket = await asyncio.to_thread(_pulse_socket, handle, attached.holder, patience)
        except BaseException:
            connection.abort()
            raise

    def lost(reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(on_lost, reason)

    pulse = Pulse(pulse_socket, min(1.0, facts.config.timeouts.heartbeat / 4), facts.config.timeouts.heartbeat, lost)
    pulse.start()
    return connection, facts, pulse


def _pulse_socket(handle: EngineHandle, holder: int, patience: float) -> socket.socket:
    """Connect a second socket, and let it be this holder's pulse."""
    try:
        if handle.path is not None:
            connected = socket.socket(socket.AF_UNIX)
            connected.settimeout(patience)
            connected.connect(handle.path)
        else:
            connected = socket.create_connection(handle.tcp, timeout=patience)
        frames = FrameReader()
        while not (payloads := frames.feed(received := connected.recv(1 << 16))):
            if not received:
                raise EngineDied("the engine's owner closed the connection during the handshake")
        message = read(from_host, payloads[0])
        if isinstance(message, Failure):
            raise exception(message)
        if not isinstance(message, Hello):
            raise WireError(f"a {type(message).__name__} came where a Hello is expected")
        connected.sendall(b"".join(frame(attach_message(handle.key, message.nonce, new_nonce(), holder))))
    except OSError as error:
        raise EngineDied(f"the engine's owner was lost during the handshake: {error}") from error
    return connected


__all__ = ["OwnerConnection", "connect"]
