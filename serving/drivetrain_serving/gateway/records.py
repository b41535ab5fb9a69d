"""Records of turns, in memory up to a bound and on disk beyond it."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.types.routed_experts import RoutedExperts

_LOGGER: Final = logging.getLogger(__name__)
_FOLDER: Final = "drivetrain-sessions-"


class Record(msgspec.Struct, frozen=True):
    """The parts of a turn that are as long as its tokens."""

    new_prompt_ids: bytes
    """Prompt ids after those of the turn that it extends, as unsigned 32-bit integers."""
    token_ids: bytes
    """Sampled ids, likewise."""
    logprobs: bytes
    """One double for each sampled id."""
    routed_experts: RoutedExperts | None = None
    """Experts of the pass that drew each sampled id; None if not asked for."""
    prompt_routed_experts: RoutedExperts | None = None
    """Experts of the prompt's ids that the turn's pass was the first to read; None if not asked for."""
    mask: bytes | None = None
    """``packed`` of a SamplingMask over ``mask_vocab_size`` ids; None if not asked for."""
    mask_vocab_size: int = 0


def packed_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids."""
    return array("I", ids).tobytes()


def packed_logprobs(logprobs: Sequence[float]) -> bytes:
    """Pack logprobs."""
    return array("d", logprobs).tobytes()


def unpacked_ids(packed: bytes) -> array[int]:
    """Unpack token ids."""
    ids: array[int] = array("I")
    ids.frombytes(packed)
    return ids


def unpacked_logprobs(packed: bytes) -> array[float]:
    """Unpack logprobs."""
    values: array[float] = array("d")
    values.frombytes(packed)
    return values


class SpillFile:
    """The file of one session, which exists once a record of it is spilled."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.size = 0
        self.deleted = False


class StoredRecord:
    """A record, in memory, on disk, or both."""

    __slots__ = ("_data", "_file", "_offset", "size")

    def __init__(self, data: bytes, file: SpillFile) -> None:
        self._data: bytes | None = data
        self._file = file
        self._offset: int | None = None
        self.size = len(data)

    def read(self) -> Record:
        """Return the record. Call it in a thread: it may read from disk."""
        data = self._data
        if data is None:
            assert self._file.path is not None
            assert self._offset is not None
            with self._file.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(self.size)
        return msgspec.msgpack.decode(data, type=Record)

    def spill(self) -> None:
        """Write the record to its session's file, and free the memory."""
        assert self._data is not None
        assert self._file.path is not None
        with self._file.path.open("ab") as opened:
            self._offset = opened.tell()
            opened.write(self._data)
        self._file.size += self.size
        self._data = None

    @property
    def file(self) -> SpillFile:
        """The session's file."""
        return self._file


class RecordStore:
    """All records of a server. Records that were not used for the longest time are spilled first.

    Args:
        memory_bytes: Memory for records.
        disk_bytes: Disk space for spilled ones.
        folder: Folder in which a folder is made when the first record is spilled; None: the system's temporary one.
            Those that killed servers left there are removed.
    """

    def __init__(self, memory_bytes: int, disk_bytes: int, folder: str | None) -> None:
        self._most_memory, self._most_disk = memory_bytes, disk_bytes
        self._parent = Path(folder or tempfile.gettempdir())
        self._folder: OwnedFolder | None = None
        self._in_memory: OrderedDict[StoredRecord, None] = OrderedDict()
        self._files = 0
        self._spilling = asyncio.Lock()
        self._writing = threading.Lock()
        """Held by the one thread that writes, or deletes a file."""
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.not_written = ""
        """Reason why the disk takes no more than it has; empty if it was never seen to refuse."""

    @property
    def is_full(self) -> bool:
        """True if neither memory nor disk has room."""
        return self.memory_bytes > self._most_memory and self.disk_bytes >= self._most_disk

    def put(self, record: Record, file: SpillFile) -> StoredRecord:
        """Keep a record in memory. Call it in the event loop."""
        stored = StoredRecord(msgspec.msgpack.encode(record), file)
        self._in_memory[stored] = None
        self.memory_bytes += stored.size
        return stored

    def touch(self, records: Sequence[StoredRecord]) -> None:
        """Mark records as used, so that others are spilled first. Call it in the event loop."""
        for record in records:
            if record in self._in_memory:
                self._in_memory.move_to_end(record)

    async def spill(self) -> None:
        """Spill records until those in memory are within the bound. Call it in the event loop."""
        async with self._spilling:
            while self._in_memory and self.memory_bytes > self._most_memory and self.disk_bytes < self._most_disk:
                record = next(iter(self._in_memory))
                try:
                    written = await asyncio.to_thread(self._write, record)
                except OSError as error:
                    _LOGGER.warning("cannot write recorded turns to %s: %s", self._parent, error)
                    self._most_disk = self.disk_bytes
                    self.not_written = f"{self._parent} could not be written: {error}"
                    return
                if written and record in self._in_memory:
                    self._in_memory.pop(record)
                    self.memory_bytes -= record.size

    def _write(self, record: StoredRecord) -> bool:
        """Spill a record; False if its session was deleted."""
        with self._writing:
            if record.file.deleted:
                return False
            if self._folder is None:
                remove_orphans(self._parent, _FOLDER)
                self._folder = OwnedFolder(self._parent, _FOLDER)
            if record.file.path is None:
                self._files += 1
                record.file.path = self._folder.path / f"{self._files}.records"
            record.spill()
            self.disk_bytes += record.size
            return True

    def forget(self, records: Sequence[StoredRecord]) -> None:
        """Free the memory of a deleted session's records. Call it in the event loop."""
        for record in records:
            if record in self._in_memory:
                del self._in_memory[record]
                self.memory_bytes -= record.size

    def delete(self, file: SpillFile) -> None:
        """Delete a session's file. Call it in a thread."""
        with self._writing:
            file.deleted = True
            if file.path is not None:
                file.path.unlink(missing_ok=True)
                self.disk_bytes -= file.size

    def close(self) -> None:
        """Delete all files. Those that cannot be removed are left to the next server on this host."""
        with self._writing:
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.remove_or_leave("the folder of recorded turns")
