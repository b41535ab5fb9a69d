"""Record the resources that this process holds, to find those that an engine left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import psutil

from drivetrain_conformance.assertions.memory_use import held_by_device
from drivetrain_conformance.harness.time_limits import Countdown

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Processes, threads, files and sockets of this process at one moment, and files that outlive processes."""

    children: frozenset[int]
    """Pids of descendants, including zombies."""
    threads: Counter[str]
    """Number of threads of each name."""
    open_files: int
    connections: int
    """IPv4 and IPv6 sockets, including listening ones."""
    temporary_files: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        """Record the current holdings."""
        _open_driver()
        gc.collect()
        me = psutil.Process()
        return cls(
            children=frozenset(child.pid for child in me.children(recursive=True)),
            # Threads of an event loop's default executor stay for later use.
            threads=Counter(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_")),
            open_files=me.num_fds(),
            connections=len(me.net_connections(kind="inet")),
            temporary_files=_names(Path(tempfile.gettempdir())),
            shared_memory=_names(_SHARED_MEMORY),
        )

    def left_since(self, before: Holdings) -> str:
        """Describe the resources held now that were not held before; empty if there are none."""
        found = {
            "processes": self.children - before.children,
            "threads": sorted((self.threads - before.threads).elements()),
            "temporary files": self.temporary_files - before.temporary_files,
            "shared memory": self.shared_memory_since(before),
            "open files": max(0, self.open_files - before.open_files),
            "connections": max(0, self.connections - before.connections),
        }
        return "; ".join(f"{what}: {held}" for what, held in found.items() if held)

    def shared_memory_since(self, before: Holdings) -> set[str]:
        """Return the files of shared memory that are new since then and that no other live process uses."""
        return {name for name in self.shared_memory - before.shared_memory if not _is_anothers(name)}


async def check_nothing_left(before: Holdings, seconds: float = 10.0) -> None:
    """Raise if, some ``seconds`` from now, something is still held that was not held ``before``."""
    countdown = Countdown(seconds)
    while left := Holdings.now().left_since(before):
        assert countdown.left(), f"left behind: {left}"
        await asyncio.sleep(0.05)


@contextmanager
def temporary_folder(folder: Path) -> Generator[None, None, None]:
    """Make this process and its children create temporary files in ``folder``; no other process may use it."""
    variable, chosen = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield
    finally:
        tempfile.tempdir = chosen
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


@cache
def _open_driver() -> None:
    """Open the files that the driver of a GPU keeps open once memory was measured, so that they are always counted."""
    held_by_device()


def _names(folder: Path) -> frozenset[str]:
    return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def _is_anothers(name: str) -> bool:
    """Return True if another live process uses this shared-memory file, or if the file is gone."""
    try:
        status = (_SHARED_MEMORY / name).stat()
    except OSError:
        return True
    if status.st_uid != os.getuid():
        return True
    return any(_uses(process.pid, status) for process in psutil.process_iter() if process.pid != os.getpid())


def _uses(pid: int, file: os.stat_result) -> bool:
    # Compare by inode, not by name: the creator of a semaphore maps it under a temporary name that no longer exists.
    folder = Path("/proc") / str(pid)
    try:
        if any(os.path.samestat(link.stat(), file) for link in (folder / "fd").iterdir() if link.exists()):
            return True
        maps = (folder / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    columns = (line.split(maxsplit=5) for line in maps if f"{_SHARED_MEMORY}/" in line)
    return any(int(column[4]) == file.st_ino for column in columns)
