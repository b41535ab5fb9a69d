"""Messages between the server and a receiving process: one line of JSON each."""

from __future__ import annotations

from typing import Literal

import msgspec


class _AnyJoin(msgspec.Struct, frozen=True, kw_only=True):
    group_name: str
    rank: int
    """Rank of the receiving process."""
    world_size: int
    timeout: float
    """Seconds in which the group must form, and each bucket must have come."""
    gpu: int = 0
    """Index of the GPU on which NCCL receives."""


class Join(_AnyJoin, frozen=True, kw_only=True, tag="join"):
    """Join a torch.distributed group; answered once all ranks have joined."""

    master_address: str
    master_port: int
    backend: Literal["nccl", "gloo"]


class JoinNccl(_AnyJoin, frozen=True, kw_only=True, tag="join_nccl"):
    """Join a bare NCCL communicator, as vLLM's weight transfer does; answered once all ranks have joined."""

    master_address: str = ""
    """Address of the trainer's store, which holds the communicator's id."""
    master_port: int = 0
    unique_id: bytes = b""
    """The id, if it came with the request; the store is not asked then."""


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


AnyJoin = Join | JoinNccl
Request = Join | JoinNccl | Receive
Answer = Done | Failed
