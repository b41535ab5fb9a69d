"""Which transport serves a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from drivetrain.errors import UnsupportedCapability
from drivetrain_weight_sync.transports.base import Reader
from drivetrain_weight_sync.transports.broadcast import BroadcastReader, Groups
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcReader
from drivetrain_weight_sync.transports.disk import DiskReader
from drivetrain_weight_sync.transports.in_process import InProcessReader
from drivetrain_weight_sync.transports.shared_memory import SharedMemoryReader

READERS: Final[dict[str, Callable[[Groups], Reader]]] = {
    "in_process": lambda _: InProcessReader(),
    "shared_memory": lambda _: SharedMemoryReader(),
    "cuda_ipc": lambda _: CudaIpcReader(),
    "broadcast": BroadcastReader,
    "disk": lambda _: DiskReader(),
}
"""``WeightSource.kind`` → the engine's end of its transport."""


def make_reader(kind: str, groups: Groups) -> Reader:
    """Make the engine's end of a transport, for a worker that is in these groups.

    Raises:
        UnsupportedCapability: this version has no transport of that kind.
    """
    if kind not in READERS:
        raise UnsupportedCapability(
            f"weights cannot be taken from a {kind} source; this version has {', '.join(READERS)}",
            capability=f"weights_{kind}",
        )
    return READERS[kind](groups)
