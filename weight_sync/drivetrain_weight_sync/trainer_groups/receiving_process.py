"""The process that joins a trainer's group and receives its broadcasts.

It is a process of its own because a torch.distributed call cannot be interrupted: to give up a group, the server kills
it. Started as ``python -m drivetrain_weight_sync.trainer_groups.receiving_process``, it reads requests from standard
input, and ends when that is closed.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import sys
import threading
from datetime import timedelta
from typing import Any, Final, Protocol

import msgspec
import torch

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.trainer_groups.process_messages import (
    Answer,
    Done,
    Failed,
    Join,
    JoinNccl,
    Piece,
    Receive,
    Request,
)

_dist: Any = torch.distributed
"""``Any``: its process group classes are not declared."""
_REQUESTS: Final = msgspec.json.Decoder(Request)
_ANSWERS: Final = msgspec.json.Encoder()
_GRACE_S: Final = 60.0
"""Torch's own timeouts are longer by this, so that the server's come first."""


def main() -> None:
    """Carry out requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # NCCL logs to standard output
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=[lines], daemon=True).start()
    group: _Group | None = None
    while True:
        answer: Answer = Done()
        try:
            request = _REQUESTS.decode(lines.get())
            match request:
                case Join():
                    group = _TorchGroup(request)
                case JoinNccl():
                    from drivetrain_weight_sync.trainer_groups.nccl import NcclGroup

                    group = NcclGroup(request)
                case Receive():
                    assert group is not None
                    _receive(group, request)
        except InvalidRequest as error:
            answer = Failed(str(error), refused=True)
        except Exception as error:
            lines_of_error = str(error).splitlines() or [""]
            answer = Failed(f"{type(error).__name__}: {lines_of_error[0]}", refused=False)
        answers.write(_ANSWERS.encode(answer) + b"\n")


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # the server is gone, and the main thread may be in a call that does not return


class _Group(Protocol):
    device: torch.device
    """Device on which tensors are received."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receive a tensor from rank 0."""


class _TorchGroup:
    """A group as the trainers' ``init_process_group`` forms it, without a default group.

    The store's prefixes are those of ``torch.distributed.distributed_c10d._new_process_group_helper``.
    """

    def __init__(self, join: Join) -> None:
        if join.backend == "nccl" and not torch.cuda.is_available():
            raise InvalidRequest("backend='nccl' needs a GPU, and the server sees none; use 'gloo'", field="backend")
        timeout = timedelta(seconds=join.timeout + _GRACE_S)
        # Rank 0 waits until as many clients as ranks have connected, so this one must count itself (wait_for_workers).
        store = _dist.TCPStore(join.master_address, join.master_port, join.world_size, False, timeout)
        store = _dist.PrefixStore(join.group_name + "/", _dist.PrefixStore(join.group_name, store))
        if join.backend == "nccl":
            self.device = torch.device("cuda", join.gpu)
            torch.cuda.set_device(self.device)
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            store = _dist.PrefixStore("cuda/", store)
            self._group = _dist.ProcessGroupNCCL(store, join.rank, join.world_size, options)
        else:
            self.device = torch.device("cpu")
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [_gloo_device(join)]
            store = _dist.PrefixStore("cpu/", store)
            self._group = _dist.ProcessGroupGloo(store, join.rank, join.world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receive a tensor from rank 0."""
        options = _dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()


def _gloo_device(join: Join) -> Any:
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return _dist.ProcessGroupGloo.create_default_device()
    # The host's own name may resolve to an address that the trainer cannot reach, such as Debian's 127.0.1.1.
    family, kind, _, _, address = socket.getaddrinfo(join.master_address, join.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards_trainer:
        towards_trainer.connect(address)  # chooses a route and sends nothing
        return _dist.ProcessGroupGloo.create_device(hostname=str(towards_trainer.getsockname()[0]))


def _receive(group: _Group, request: Receive) -> None:
    memory = None if request.path is None else _mapped(request.path, request.nbytes)
    for piece in request.pieces:
        kept = None if memory is None else _place(memory, piece)
        if kept is not None and kept.device == group.device:
            group.broadcast(kept)
            continue
        received = torch.empty(piece.shape, dtype=_dtype(piece), device=group.device)
        group.broadcast(received)
        if kept is not None:
            kept.copy_(received)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    with open(path, "r+b") as file:
        # A tensor keeps the mapping alive, but cannot prevent it from being closed under it: only drop it.
        return torch.frombuffer(mmap.mmap(file.fileno(), max(nbytes, 1), flags=mmap.MAP_SHARED), dtype=torch.uint8)


def _place(memory: torch.Tensor, piece: Piece) -> torch.Tensor:
    dtype = _dtype(piece)
    elements = 1
    for size in piece.shape:
        elements *= size
    return memory[piece.offset : piece.offset + elements * dtype.itemsize].view(dtype).view(piece.shape)


def _dtype(piece: Piece) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    return dtype


if __name__ == "__main__":
    main()
