"""The owner's end of handles: listens on a socket, lets in who knows the key, and serves each holder's calls."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.holder_calls import Claims, HolderCalls
from drivetrain.engine.parts import Parts
from drivetrain.engine.shared_state import FACTS, STATE, EngineFacts, SharedState
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineDied, EngineError, EngineInternalError, EngineStateError, InvalidConfig, WireError
from drivetrain.process.handshake import check_version, hello
from drivetrain.process.proof import LONGEST_KEY, new_nonce, proof, proves
from drivetrain.process.pulse import PulseSocket, PulseWatch
from drivetrain.process.rpc_methods import SHARED_METHODS
from drivetrain.process.rpc_server import RpcServer
from drivetrain.process.sockets_in_forks import keep_from_forks
from drivetrain.process.tls import server_context
from drivetrain.process.tls_server import TlsServer
from drivetrain.process.wire import FRAME_LIMIT, Attach, Attached, Call, FromTrainer, State
from drivetrain.process.wire_errors import failure
from drivetrain.types.handle import EngineHandle

logger = logging.getLogger("drivetrain.engine")

UNKNOWN_LIMIT: Final = 4096
"""Maximum payload in bytes from a connection that has not proved the key."""
UNKNOWN_S: Final = 10.0
"""Seconds in which a connection must prove the key."""
_FOLDER: Final = "drivetrain-engine-"
UNKNOWN_MOST: Final = 64
"""Connections at one time that may not have proved the key yet."""
_SHORTEST_KEY: Final = 16
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class EngineListener:
    """Listens for holders of one engine.

    Args:
        parts: The engine's parts.
        facts: Returns the description of the engine that holders get.
    """

    def __init__(self, parts: Parts, facts: Callable[[], EngineFacts]) -> None:
        self.parts = parts
        self.facts = facts
        self.claims = Claims()
        self.pulses = PulseWatch()
        self.holders: dict[int, HolderConnection] = {}
        self.unknown: set[HolderConnection] = set()
        self.numbers = itertools.count(1)
        self._servers: list[asyncio.Server] = []
        self._folder: OwnedFolder | None = None
        self._state = self._shared_state()
        parts.controller.subscribe(self._changed)
        self.pulses.start()

    async def listen(
        self,
        address: str | None,
        key: str,
        announced: str | None,
        certfile: str | None = None,
        keyfile: str | None = None,
    ) -> EngineHandle:
        """Listen on a Unix socket that only this user can open, or on ``HOST:PORT``; return the handle.

        Raises:
            InvalidConfig: the address cannot be listened on, the key is too short or too long, or the files of the
                certificate cannot be used.
            EngineInternalError: the Unix socket cannot be made.
        """
        check_key(key)
        loop = asyncio.get_running_loop()

        def serve() -> HolderConnection:
            return HolderConnection(self, key)

        check_address(address, announced)
        tls = check_certificate(address, certfile, keyfile)
        if address is None:
            temporary = Path(tempfile.gettempdir())
            try:
                if self._folder is None:
                    remove_orphans(temporary, _FOLDER)
                    self._folder = OwnedFolder(temporary, _FOLDER)  # with mode 0700
                path = f"{self._folder.path}/{len(self._servers)}.sock"
                self._add(await loop.create_unix_server(serve, path))
            except OSError as error:
                raise EngineInternalError(
                    f"the engine's socket cannot be made in {temporary} ({error}); make room there, or name another "
                    "folder by TMPDIR"
                ) from error
            return EngineHandle(f"unix:{path}", key)
        host, port = _host_and_port(address)
        shown_host = _in_address(announced or host)
        scheme, fingerprint = ("tcp", None) if tls is None else ("tls", tls[1])
        try:
            if tls is None:
                server = await loop.create_server(serve, host, port)
            else:
                server = await loop.create_server(partial(_serve_tls, tls[0], serve), host, port)
        except (OSError, ValueError) as error:  # ValueError: no host name at all
            raise InvalidConfig(f"listen={shown(address)}: {error}", field="listen") from error
        self._add(server)
        bound = server.sockets[0].getsockname()[1]
        return EngineHandle(f"{scheme}://{shown_host}:{bound}", key, fingerprint)

    def _add(self, server: asyncio.Server) -> None:
        keep_from_forks(server)
        self._servers.append(server)

    # State -------------------------------------------------------------------------------------------------------

    def _shared_state(self) -> SharedState:
        parts = self.parts
        weights = parts.weights
        return SharedState(parts.controller.status, weights.version, parts.loaded_adapters.names, weights.update_id)

    @property
    def state(self) -> SharedState:
        """The engine's state now."""
        return self._state

    def _changed(self) -> None:
        state = self._shared_state()
        if state != self._state:
            self._state = state
            for holder in self.holders.values():
                holder.tell(state)

    # The end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop listening and disconnect every holder."""
        for server in self._servers:
            server.close()
        status = self.parts.controller.status
        why = status.why if status.state is EngineState.FAILED else "the engine's owner closed it"
        for holder in self.holders.values():
            holder.drop(EngineDied(why))  # a holder's calls raise it from now on, whoever ended the engine
        for connection in self.unknown:
            connection.drop(EngineStateError(why, state="closed"))
        while self.holders:
            await asyncio.wait([holder.undone for holder in self.holders.values()])
        self.parts.controller.unsubscribe(self._changed)
        await asyncio.to_thread(self.pulses.stop)
        if self._folder is not None:
            self._folder.remove_or_leave("the folder of an engine's socket")


class HolderConnection(RpcServer):
    """The connection of one holder: the handshake, then its calls."""

    def __init__(self, listener: EngineListener, key: str) -> None:
        super().__init__(SHARED_METHODS, UNKNOWN_LIMIT)
        self.undone: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection has ended and nothing that the holder held is left."""
        self._listener = listener
        self._key = key
        self._nonce = new_nonce()
        self._calls: HolderCalls | None = None
        self._number = 0
        self._undoing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        keep_from_forks(transport)
        if len(self._listener.unknown) >= UNKNOWN_MOST:
            self._transport.abort()
            return
        self._listener.unknown.add(self)
        self._alarm = self._loop.call_later(UNKNOWN_S, self.lost, "did not prove the key in time")
        self._writes.put(msgspec.structs.replace(hello(), nonce=self._nonce))

    def drop(self, error: EngineError) -> None:
        """Disconnect the holder, whose calls get ``error``."""
        self._writes.put(failure(0, error))
        self._writes.flush()
        self._transport.close()

    def lost(self, reason: str) -> None:
        """Disconnect a holder, such as one whose pulse has stopped; called in the event loop."""
        if not self._transport.is_closing():
            logger.warning("%s %s", "a connection" if self._calls is None else self._calls.name, reason)
            self._transport.abort()

    def got_pulse(self) -> None:
        """Record that the holder's pulse is watched."""
        self._alarm.cancel()

    def tell(self, state: SharedState) -> None:
        """Tell the holder of a change."""
        self._writes.put(State(STATE.encode(state)))

    # Messages ----------------------------------------------------------------------------------------------------

    def _take_other(self, message: FromTrainer) -> None:
        if not isinstance(message, Attach) or self._calls is not None:
            raise WireError(f"a {type(message).__name__} came where an Attach or calls are expected")
        if not proves(message.proof, self._key, "holder", self._nonce, message.nonce):
            raise WireError("the key is wrong; take the handle from the engine's owner as it is now")
        check_version(message.name[:200], message.wire_version, message.drivetrain)
        self._alarm.cancel()
        self._listener.unknown.discard(self)
        if message.pulse_of:
            self._become_pulse(message.pulse_of)
            return
        listener = self._listener
        listener.parts.controller.status.require_open("attach()")
        self._number = next(listener.numbers)
        listener.holders[self._number] = self
        self._calls = HolderCalls(message.name[:200], listener.parts, listener.claims)
        self._frames.limit = FRAME_LIMIT
        # Without a pulse, a holder that freezes would never be missed.
        self._alarm = self._loop.call_later(UNKNOWN_S, self.lost, "did not connect its pulse in time")
        self._writes.put(
            Attached(
                proof(self._key, "owner", message.nonce, self._nonce),
                self._number,
                FACTS.encode(replace(listener.facts(), holder=self._number)),
                STATE.encode(listener.state),
            )
        )

    def _become_pulse(self, number: int) -> None:
        """Hand the socket to the thread that answers pulses."""
        holder = self._listener.holders.get(number)
        if holder is None:
            raise WireError(f"there is no holder {number}")
        pulse = _taken(self._transport)
        patience = self._listener.parts.controller.config.timeouts.heartbeat

        def lost(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the connection
                # A turn later: one that detaches closes its call socket first, and is not reported.
                self._loop.call_soon_threadsafe(self._loop.call_soon, holder.lost, reason)

        holder.got_pulse()
        add = partial(self._listener.pulses.add, has_beaten=self._frames.has_more)
        self._loop.call_soon(add, pulse, patience, lost)

    def _target(self, call: Call) -> HolderCalls:
        if self._calls is None:
            raise WireError(f"{call.method} was called before the key was proved")
        return self._calls

    # The end -----------------------------------------------------------------------------------------------------

    def _ended(self, code: int) -> None:
        if self in self._listener.unknown or self._calls is not None:
            self._alarm.cancel()
        self._listener.unknown.discard(self)
        if self._calls is None:
            if not self.undone.done():
                self.undone.set_result(None)
        elif self._undoing is None:
            self._calls.leave()
            self._undoing = self._loop.create_task(self._undo(self._calls))

    async def _undo(self, calls: HolderCalls) -> None:
        try:
            running = [*(task for task, _ in self._running.values()), *self._given_up.values()]
            if running:
                await asyncio.wait(running)
            await calls.undo()
        finally:
            self._listener.holders.pop(self._number, None)
            self.undone.set_result(None)


def _serve_tls(context: ssl.SSLContext, serve: Callable[[], HolderConnection]) -> TlsServer:
    return TlsServer(context, serve())


def check_key(key: str) -> None:
    """Raise InvalidConfig unless holders can prove this key."""
    if not _SHORTEST_KEY <= len(key) <= LONGEST_KEY or not key.isascii():
        raise InvalidConfig(
            f"key has {len(key)} characters; expected {_SHORTEST_KEY} to {LONGEST_KEY} ASCII characters; None "
            "makes a random key",
            field="key",
        )


def check_address(address: str | None, announced: str | None) -> None:
    """Check the ``HOST:PORT`` to listen on, None for a Unix socket, and the host name that a handle is to have.

    Raises:
        InvalidConfig: One of them is malformed, or a host name is announced for a Unix socket.
    """
    if address is not None:
        host, _ = _host_and_port(address)
        if not _is_host(host):
            raise InvalidConfig(f"listen={shown(address)}: {shown(host)} is no host name", field="listen")
    if announced is None:
        return
    if address is None:
        raise InvalidConfig(
            f"announce={shown(announced)} needs listen: a Unix socket has no host name; give listen='HOST:PORT', or "
            "leave announce out",
            field="announce",
        )
    if not _is_host(announced):
        raise InvalidConfig(f"announce={shown(announced)}: expected a host name, such as node3", field="announce")


def check_certificate(
    address: str | None, certfile: str | None, keyfile: str | None
) -> tuple[ssl.SSLContext, str] | None:
    """Read the files of a certificate; return the TLS context and the fingerprint, or None without a certificate.

    Raises:
        InvalidConfig: They cannot be used, or there is no address to use them on.
    """
    if certfile is None and keyfile is not None:
        raise InvalidConfig(
            f"ssl_keyfile={shown(keyfile)} needs ssl_certfile, the certificate of that key", field="ssl_certfile"
        )
    if certfile is not None and address is None:
        raise InvalidConfig(
            f"ssl_certfile={shown(certfile)}: a Unix socket needs no TLS; give listen='HOST:PORT', too",
            field="ssl_certfile",
        )
    return None if certfile is None else server_context(certfile, keyfile)


def _taken(transport: asyncio.Transport) -> PulseSocket:
    """Take a connection's socket away from the event loop."""
    if isinstance(transport, TlsServer):
        return transport.detach()
    taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    keep_from_forks(taken)
    taken.setblocking(False)
    transport.pause_reading()
    transport.abort()  # closes asyncio's descriptor; ours stays
    return taken


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_host(name: str) -> bool:
    if ":" not in name:
        return _HOST_NAME.fullmatch(name) is not None
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidConfig(f"listen={shown(address)}: expected HOST:PORT, such as 127.0.0.1:0", field="listen")
    return host.strip("[]"), int(port)
