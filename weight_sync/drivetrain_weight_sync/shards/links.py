"""Connections between the ranks of a trainer, for messages and the bytes of shards."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
import torch

from drivetrain.errors import DeadlineExceeded, DrivetrainError, TrainerRankLost, WeightSyncError, from_wire, to_wire
from drivetrain_weight_sync.shards.pieces import Piece

_LENGTH: Final = struct.Struct("!Q")
_LONGEST: Final = 1 << 30
"""Most bytes of a message; the description of 100 000 shards takes a tenth of it."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a connection, from a rank that contributes."""

    key: str
    rank: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """First message of a push, from each rank that contributes."""

    version: str
    gpu: str
    """UUID of the GPU that holds every shard; empty if none does."""
    host: str
    """Names the host, so that ranks of one host know it."""
    pieces: tuple[Piece, ...] | None
    """None: the same as in the last push."""


class FormGroup(msgspec.Struct, frozen=True, tag=True):
    """Form a group of NCCL, through which shards travel from now on."""

    name: str


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send the shards with these indices."""

    indices: tuple[int, ...]


class Sending(msgspec.Struct, frozen=True, tag=True):
    """The shards follow."""


class PartSpec(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor, as a rank stages it in memory of its own."""

    index: int
    """Index of the shard that holds it, among the rank's."""
    first: int
    """Index of its first element in the flattened shard."""
    name: str
    dtype: str
    """The engine's."""
    begin: int
    """Byte of the tensor at which it begins, in that dtype."""
    numel: int


class StageParts(msgspec.Struct, frozen=True, tag=True):
    """Stage these shards where the engine can read them, and describe them."""

    transport: str
    """``cuda_ipc`` or ``shared_memory``."""
    gpu_share: float
    """Share of the GPU's time that copies may take."""
    buckets: tuple[tuple[PartSpec, ...], ...] | None
    """None: the same as in the last push."""


class PartsStaged(msgspec.Struct, frozen=True, tag=True):
    """The shards are staged."""

    source: dict[str, Any]
    """The fields of a ``SharedMemorySource`` or ``CudaIpcSource``."""
    sums: tuple[int, ...]
    """``part_sum`` of each part, in order."""
    strange: dict[str, str]
    """Parts that hold values that are not finite, and which."""


class Staged(msgspec.Struct, frozen=True, tag=True):
    """Every tensor is staged, and the engine has prepared the update."""


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The engine serves the new weights."""

    result: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The push failed, on whichever side."""

    error: str
    message: str
    fields: dict[str, Any]


Message = Hello | Offer | FormGroup | Send | Sending | StageParts | PartsStaged | Staged | Committed | Failed
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


class Link:
    """A connection to another rank of the trainer. Used by one thread at a time; :meth:`close` is safe from any.

    Args:
        connection: The connected socket.
        rank: The other rank.
        timeout: Seconds without progress after which it counts as lost.
    """

    def __init__(self, connection: socket.socket, rank: int, timeout: float) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout)
        self._socket = connection
        self._timeout = timeout
        self.rank = rank
        self.broken = False
        """True once the connection has failed or was closed."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def say(self, message: Message) -> None:
        """Send a message."""
        encoded = _encoder.encode(message)
        with self._failing():
            self._socket.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def hear(self) -> Message:
        """Wait for the next message.

        Raises:
            DrivetrainError: the other rank reports that the push failed: its error.
            TrainerRankLost: the connection ended.
            DeadlineExceeded: no message came.
        """
        with self._failing():
            (length,) = _LENGTH.unpack(self._read(bytearray(_LENGTH.size)))
            if length > _LONGEST:
                raise ConnectionError(f"a message of {length} bytes")
            message: Message = _decoder.decode(self._read(bytearray(length)))
        if isinstance(message, Failed):
            raise from_wire(message.error, message.message, message.fields)
        return message

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor's bytes."""
        with self._failing():
            self._socket.sendall(_bytes_of(tensor.cpu().contiguous()))

    def fill(self, tensor: torch.Tensor) -> None:
        """Read a tensor's values."""
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        read = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._failing():
            self._read(_bytes_of(read))
        if not direct:
            tensor.copy_(read)

    def require_silent(self) -> None:
        """Raise the error that the other rank has reported, or TrainerRankLost if it is gone."""
        with self._failing():
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            silent = not poll.poll(0)
        if not silent:
            message = self.hear()
            raise WeightSyncError(f"rank {self.rank} of the trainer sent {type(message).__name__} out of turn")

    def close(self) -> None:
        """End the connection, also for a thread that waits for it."""
        self.broken = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, buffer: bytearray | memoryview) -> bytearray | memoryview:
        view, begin = memoryview(buffer), 0
        while begin < len(view):
            count = self._socket.recv_into(view[begin:])
            if not count:
                raise ConnectionError("it ended")
            begin += count
        return buffer

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            self.broken = True
            raise DeadlineExceeded(
                f"timed out after {self._timeout:g} s waiting for rank {self.rank} of the trainer"
            ) from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.broken = True
            raise lost(self.rank, error) from error


def lost(rank: int, why: Exception) -> TrainerRankLost:
    """Return the error for a rank whose connection ended."""
    return TrainerRankLost(
        f"rank {rank} of the trainer was lost during the push ({why}); the engine loads nothing of it that is not "
        "complete. Find out why that rank ended, and push again from all ranks",
        rank=rank,
    )


def failure(error: BaseException) -> Failed:
    """Describe an error to another rank."""
    if not isinstance(error, DrivetrainError):
        error = WeightSyncError(f"the push failed on another rank: {type(error).__name__}: {error}")
    return Failed(*to_wire(error))


def encoded(message: Message) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def decoded_failure(data: bytes) -> DrivetrainError:
    """Return the error that an encoded :class:`Failed` describes."""
    message = _decoder.decode(data)
    assert isinstance(message, Failed)
    return from_wire(message.error, message.message, message.fields)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
