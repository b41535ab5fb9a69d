"""Choice of the reader for a weight source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from drivetrain.errors import UnsupportedCapability
from drivetrain.types.weights import PluginSource, WeightSource
from drivetrain_weight_sync.transports.base import Reader
from drivetrain_weight_sync.transports.broadcast import BroadcastReader
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcReader
from drivetrain_weight_sync.transports.disk import DiskReader
from drivetrain_weight_sync.transports.in_process import InProcessReader
from drivetrain_weight_sync.transports.plugins import find_transport
from drivetrain_weight_sync.transports.process_groups import Groups
from drivetrain_weight_sync.transports.shards import ShardsReader
from drivetrain_weight_sync.transports.shared_memory import SharedMemoryReader

READERS: Final[dict[str, Callable[[Groups], Reader]]] = {
    "in_process": lambda _: InProcessReader(),
    "shared_memory": lambda _: SharedMemoryReader(),
    "cuda_ipc": lambda _: CudaIpcReader(),
    "shards": lambda _: ShardsReader(),
    "broadcast": BroadcastReader,
    "disk": lambda _: DiskReader(),
}
"""Factory of the engine's reader for each ``WeightSource.kind``; :func:`find_transport` finds those of plugins."""


class Readers:
    """The engine's readers, each created when a source first needs it.

    Args:
        groups: The groups in which a trainer broadcasts to this worker.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._made: dict[str, Reader] = {}

    def of(self, source: WeightSource) -> Reader:
        """Return the reader for a source.

        Raises:
            UnsupportedCapability: this version has no transport of that kind.
            InvalidRequest: no installed plugin has the transport.
        """
        kind = f"plugin {source.transport}" if isinstance(source, PluginSource) else source.kind
        if kind not in self._made:
            self._made[kind] = self._make(source)
        return self._made[kind]

    def give_up(self, reader: Reader) -> None:
        """Create a new reader the next time, as this one is still busy."""
        self._made = {kind: made for kind, made in self._made.items() if made is not reader}

    def close(self) -> None:
        """Close every reader, unmapping memory."""
        for reader in self._made.values():
            reader.close()
        self._made.clear()

    def _make(self, source: WeightSource) -> Reader:
        if isinstance(source, PluginSource):
            return find_transport(source.transport).reader()
        if source.kind not in READERS:
            raise UnsupportedCapability(
                f"weights cannot be taken from a {source.kind} source; this version has {', '.join(READERS)}",
                capability=f"weights_{source.kind}",
            )
        return READERS[source.kind](self._groups)
