"""Frames and messages on the sockets between a trainer and an engine's host process.

A frame is the payload's length, four bytes little-endian, and the payload: one message as a msgpack array whose first
element names its kind. ``docs/reference/wire.md`` is the full specification.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from drivetrain.backend.base import StopKind
from drivetrain.errors import WireError

WIRE_VERSION: Final = 12
"""Increases whenever a message, a method, or a type in a method's signature changes."""

HANDSHAKE_LIMIT: Final = 16 * 2**20
"""Maximum payload in bytes until the handshake is done; text of another protocol reads as a larger length."""
FRAME_LIMIT: Final = 2**32 - 1
"""Maximum payload in bytes, the limit of a four-byte length. A tensor read by value must fit."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=str.lower):
    pass


# From the host, on the call socket -----------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The first frame. Its leading fields never change, so that any two versions can identify each other."""

    wire_version: int
    drivetrain: str
    python: str
    pid: int
    nonce: bytes = b""
    """Sent by an engine's listener, for the holder's proof of the key."""


class Attached(_Message, frozen=True):
    """The holder's proof is right. Calls may follow."""

    proof: bytes
    """HMAC of the holder's nonce: the listener knows the key, too."""
    holder: int
    """The holder's number, which its pulse names."""
    description: msgspec.Raw
    """Facts of the engine; see ``drivetrain.engine.shared_state``."""
    state: msgspec.Raw


class State(_Message, frozen=True):
    """The engine's state changed, or its weight version, or its adapters."""

    state: msgspec.Raw


class Welcome(_Message, frozen=True):
    """The backend of ``Open`` is loaded and configured; calls may follow."""

    backend: str
    engine_distribution: str
    engine_version: str
    native_stops: frozenset[StopKind]
    counts_resumed_tokens: bool


class Reply(_Message, frozen=True):
    """Result of a call."""

    id: int
    result: msgspec.Raw


class Failure(_Message, frozen=True):
    """A call raised, or, with id 0, the connection is refused; ``error`` names a class of ``drivetrain.errors``."""

    id: int
    error: str
    message: str
    fields: dict[str, object]


class Item(_Message, frozen=True):
    """One value of a stream."""

    id: int
    value: msgspec.Raw


class End(_Message, frozen=True):
    """A stream is exhausted, or a cancelled call is over."""

    id: int


class Progress(_Message, frozen=True):
    """Progress of ``start``, in a few words."""

    text: str


# From the host, on the watch socket ----------------------------------------------------------------------------------


class Heartbeat(_Message, frozen=True):
    """The host is alive; its event loop has been blocked for ``loop_lag`` seconds (0 until started)."""

    loop_lag: float


class Fatal(_Message, frozen=True):
    """The engine has failed although its host is alive; the trainer kills the host."""

    message: str


# From the trainer, on the call socket --------------------------------------------------------------------------------


class Open(_Message, frozen=True):
    """Answer to ``Hello``: the backend to load, and the fields of its ``EngineConfig`` that are set."""

    wire_version: int
    drivetrain: str
    backend: str
    config: msgspec.Raw
    import_path: tuple[str, ...]
    """Module search path to append to the host's own; empty if the host is another environment's Python."""


class Attach(_Message, frozen=True):
    """A holder's answer to a listener's ``Hello``: proof of the key, and the purpose of the connection."""

    wire_version: int
    drivetrain: str
    nonce: bytes
    proof: bytes
    """HMAC-SHA-256 of the listener's nonce by the key."""
    pulse_of: int
    """0: a connection for calls; otherwise the pulse of the holder with this number."""
    name: str
    """The holder's host and process, for messages."""


class Call(_Message, frozen=True):
    """Call a method; ids count up from 1."""

    id: int
    method: str
    arguments: tuple[msgspec.Raw, ...]


class Cancel(_Message, frozen=True):
    """Cancel a call whose caller stopped waiting; a generation is aborted. If it is no stream, ``End`` follows."""

    id: int


FromHost = Hello | Welcome | Attached | State | Reply | Failure | Item | End | Progress
FromWatch = Heartbeat | Fatal
FromTrainer = Open | Attach | Call | Cancel
Message = FromHost | FromWatch | FromTrainer

MESSAGES: Final[tuple[type[Message], ...]] = (
    Hello,
    Open,
    Welcome,
    Attach,
    Attached,
    State,
    Call,
    Reply,
    Failure,
    Item,
    End,
    Cancel,
    Progress,
    Heartbeat,
    Fatal,
)

from_host: Final = msgspec.msgpack.Decoder(FromHost)
from_watch: Final = msgspec.msgpack.Decoder(FromWatch)
from_trainer: Final = msgspec.msgpack.Decoder(FromTrainer)
encode: Final = msgspec.msgpack.Encoder().encode

M = TypeVar("M")


def read(decoder: msgspec.msgpack.Decoder[M], payload: memoryview) -> M:
    """Decode one payload.

    Raises:
        WireError: The payload is not a message that this side may send.
    """
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        start = bytes(payload[:40])
        raise WireError(f"not a message of wire version {WIRE_VERSION}: {error}; it begins with {start!r}") from error


def frame(message: Message) -> tuple[bytes, bytes]:
    """Return a message's frame as (length, payload), so that many frames can be joined at once.

    Raises:
        WireError: The message is larger than :data:`FRAME_LIMIT`.
    """
    payload = encode(message)
    if len(payload) > FRAME_LIMIT:
        raise WireError(f"a message of {len(payload)} bytes does not fit a frame, whose limit is {FRAME_LIMIT} bytes")
    return len(payload).to_bytes(4, "little"), payload


class FrameReader:
    """Splits received bytes into payloads of at most ``limit`` bytes."""

    def __init__(self, limit: int = HANDSHAKE_LIMIT) -> None:
        self.limit = limit
        self._parts: list[bytes] = []
        self._held = 0
        self._needed = 0

    @property
    def has_more(self) -> bool:
        """True if bytes came after the last whole frame."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[memoryview]:
        """Add received bytes and return every payload that is now complete.

        Raises:
            WireError: A length is 0 or over the limit, so these are not drivetrain's frames.
        """
        if self._parts:
            self._parts.append(data)
            self._held += len(data)
            if self._held < self._needed:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
        view = memoryview(data)
        payloads = []
        position, end, needed = 0, len(data), 4
        while end - position >= 4:
            length = int.from_bytes(view[position : position + 4], "little")
            if not 0 < length <= self.limit:
                raise WireError(
                    f"a frame claims {length} bytes, where 1 to {self.limit} may be; the bytes "
                    f"{data[position : position + 16]!r} are not drivetrain's wire protocol"
                )
            if end - position - 4 < length:
                needed = 4 + length
                break
            payloads.append(view[position + 4 : position + 4 + length])
            position += 4 + length
        if position < end:
            self._parts.append(data[position:])
            self._held, self._needed = end - position, needed
        return payloads
