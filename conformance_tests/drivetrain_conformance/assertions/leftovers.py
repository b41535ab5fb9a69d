"""What this process holds, and what of it an engine left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Processes, threads, files and sockets of this process at one moment, and files that outlive processes."""

    children: frozenset[int]
    """Those that ended and were not waited for included."""
    threads: Counter[str]
    """How many there are of each name."""
    open_files: int
    connections: int
    """Sockets of the internet families, those that listen included."""
    temporary_files: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        """Look."""
        gc.collect()
        me = psutil.Process()
        return cls(
            children=frozenset(child.pid for child in me.children(recursive=True)),
            # Those of an event loop's own pool stay for the next who needs one.
            threads=Counter(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_")),
            open_files=me.num_fds(),
            connections=len(me.net_connections(kind="inet")),
            temporary_files=_names(Path(tempfile.gettempdir())),
            shared_memory=_names(_SHARED_MEMORY),
        )

    def left_since(self, before: Holdings) -> str:
        """What is held now that was not before, in words; empty if nothing is."""
        found = {
            "processes": self.children - before.children,
            "threads": sorted((self.threads - before.threads).elements()),
            "temporary files": self.temporary_files - before.temporary_files,
            "shared memory": {name for name in self.shared_memory - before.shared_memory if not _is_anothers(name)},
            "open files": max(0, self.open_files - before.open_files),
            "connections": max(0, self.connections - before.connections),
        }
        return "; ".join(f"{what}: {held}" for what, held in found.items() if held)


async def check_nothing_left(before: Holdings, within: float = 10.0) -> None:
    """Raise if something is still held ``within`` seconds from now that was not held ``before``."""
    ends = time.monotonic() + within
    while left := Holdings.now().left_since(before):
        assert time.monotonic() < ends, f"left behind: {left}"
        await asyncio.sleep(0.05)


@contextmanager
def temporary_folder(folder: Path) -> Generator[None, None, None]:
    """Let this process and those that it starts make their temporary files in ``folder``, where nobody else does."""
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


def _names(folder: Path) -> frozenset[str]:
    return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def _is_anothers(name: str) -> bool:
    """Whether a process that lives, and is not this one, uses this file of shared memory, or it has gone meanwhile."""
    try:
        status = (_SHARED_MEMORY / name).stat()
    except OSError:
        return True
    if status.st_uid != os.getuid():
        return True
    return any(_uses(process.pid, status) for process in psutil.process_iter() if process.pid != os.getpid())


def _uses(pid: int, file: os.stat_result) -> bool:
    # Not by its name: who made a semaphore has mapped it under a temporary one, which is gone.
    folder = Path("/proc") / str(pid)
    try:
        if any(os.path.samestat(link.stat(), file) for link in (folder / "fd").iterdir() if link.exists()):
            return True
        maps = (folder / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    columns = (line.split(maxsplit=5) for line in maps if f"{_SHARED_MEMORY}/" in line)
    return any(int(column[4]) == file.st_ino for column in columns)
