"""Messages between the server and a receiving process: one line of JSON each."""

from __future__ import annotations

from typing import Literal

import msgspec


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join a trainer's group; answered once all ranks have joined."""

    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str
    backend: Literal["nccl", "gloo"]
    timeout: float
    """Seconds after which torch gives up on the group, and on a broadcast."""


class Piece(msgspec.Struct, frozen=True):
    """A tensor that rank 0 broadcasts."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Byte offset in the memory that receives it; a multiple of the dtype's size."""


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Receive broadcasts in this order; answered once all have come."""

    pieces: tuple[Piece, ...]
    path: str | None
    """File to map and receive into; None: discard the tensors."""
    nbytes: int
    """Size of the file."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The message was carried out."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The message failed, and the group with it."""

    message: str
    refused: bool
    """True if the request cannot be honoured; false if the group or a peer failed."""


Request = Join | Receive
Answer = Done | Failed
