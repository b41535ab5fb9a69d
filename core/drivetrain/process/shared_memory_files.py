"""Files of shared memory that killed processes leave behind: finding, listing and removing them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_SHARED_MEMORY: Final = Path("/dev/shm")
_SEMAPHORE: Final = "sem.mp-"
_LIST: Final = "drivetrain-shared-memory"
"""Name of the list of a host's shared-memory files in its temporary folder: inode and path, a line for each."""
_NUMBERS: Final = re.compile(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])")
_PAUSE: Final = 50
"""Least pause after looking at a host's processes, in multiples of the processor's time that it took."""


class SharedMemoryList:
    """The list of a host's shared memory in its temporary folder, which :func:`unlink_listed` reads.

    It holds files that the host's processes have mapped. Files that this process has mapped too, or that bear its
    number, are left out: they may be the trainer's own.

    Args:
        folder: The temporary folder.
        since: Time of the host's start, in seconds since the epoch. Files that did not change from then on were there
            before, such as a dataset.
    """

    def __init__(self, folder: Path, since: float) -> None:
        self._folder = folder
        self._since = since
        self._inodes: dict[Path, int] = {}
        self._seen = _files()
        self._appeared = False
        self._due = 0.0

    def files(self) -> set[Path]:
        """Return the files that were found so far and are still there."""
        return {file for file, inode in self._inodes.items() if _inode(file) == inode}

    def look(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        """Add the files that the host's processes have mapped meanwhile; to be called several times a second.

        The processes are asked for only if a file appeared in the folder of shared memory: finding them takes
        milliseconds where many run. They are asked for twice, because a file is there before it is mapped.

        Raises:
            OSError: The list cannot be written.
        """
        if time.monotonic() < self._due:
            return
        began = time.thread_time()
        there = _files()
        appeared = not there.items() <= self._seen.items()
        wanted, self._seen, self._appeared = appeared or self._appeared, there, appeared
        found = self._found(processes()) if wanted else {}
        # By the processor's time: on a busy machine the wall clock would make the pause much longer than needed.
        self._due = time.monotonic() + _PAUSE * (time.thread_time() - began)
        if not found.items() <= self._inodes.items():
            self._inodes |= found
            list_shared_memory(self.files(), self._folder, self._since)

    def _found(self, processes: Iterable[psutil.Process]) -> dict[Path, int]:
        others = shared_memory_of(processes) - shared_memory_of([psutil.Process()])
        inodes = {file: _inode(file) for file in others if _numbers(file).isdisjoint((os.getpid(), os.getppid()))}
        return {file: inode for file, inode in inodes.items() if inode is not None}


def list_shared_memory(files: Iterable[Path], folder: Path, since: float) -> None:
    """List a host's shared-memory files in its temporary folder, for :func:`unlink_listed`.

    Args:
        files: The files.
        folder: The folder.
        since: Time of the host's start, in seconds since the epoch. Files that did not change from then on were there
            before, such as a dataset.
    """
    lines: list[str] = []
    for file in files:
        with suppress(FileNotFoundError):  # removed meanwhile
            status = file.stat()
            if status.st_ctime >= since:
                lines.append(f"{status.st_ino} {file}\n")
    written = folder / f"{_LIST}.new"
    written.write_bytes(os.fsencode("".join(lines)))
    written.replace(folder / _LIST)  # this process may be killed at any time, and the list before must not be lost


def listed(folder: Path) -> set[Path]:
    """Return the listed files that are still there."""
    try:
        *lines, _ = os.fsdecode((folder / _LIST).read_bytes()).split("\n")
    except FileNotFoundError:
        return set()  # the host had none
    files: set[Path] = set()
    for inode, _, path in (line.partition(" ") for line in lines):
        with suppress(ValueError):  # the second line of a name with a line break
            if _inode(Path(path)) == int(inode):
                files.add(Path(path))
    return files


def unlink_listed(folder: Path) -> None:
    """Remove the shared memory of a host that was killed at once with its trainer, which would have removed it.

    Raises:
        BlockingIOError: A process of the host outlives it, and uses a file: nothing was removed.
    """
    files = listed(folder)
    used = files & shared_memory_of(psutil.process_iter()) if files else set()
    if used:
        raise BlockingIOError(f"still in use: {', '.join(map(str, used))}")
    unlink(files)


def unlink(files: Iterable[Path]) -> None:
    """Remove files; missing ones are ignored."""
    for file in files:
        file.unlink(missing_ok=True)


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared-memory files that these processes have mapped."""
    # By inode: a semaphore's creator has mapped it under a temporary name that no longer exists.
    files = {inode: file for file, inode in _files().items()}
    found: set[Path] = set()
    for process in processes if files else ():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # ended meanwhile, or owned by another user
        columns = (line.split(maxsplit=5) for line in maps.splitlines() if f"{_SHARED_MEMORY}/" in line)
        found |= {files[inode] for inode in (int(column[4]) for column in columns) if inode in files}
    return found


def changed_since(file: Path, since: float) -> bool:
    """Return False for a file that was there before the host, such as a dataset, and for one that is gone."""
    try:
        return file.stat().st_ctime >= since
    except OSError:
        return False


def left_by(killed: Collection[int], files: Collection[Path]) -> set[Path]:
    """Choose the files to remove among those that the killed processes used.

    These are semaphores of Python's multiprocessing, files named after a killed process, and files that no process
    uses any more. Files named after this process or its parent are kept: they may have been lent.
    """
    numbers = {file: _numbers(file) for file in files}
    own = {file for file in files if file.name.startswith(_SEMAPHORE) or not numbers[file].isdisjoint(killed)}
    others = {file for file in set(files) - own if numbers[file].isdisjoint((os.getpid(), os.getppid()))}
    if others:
        others -= shared_memory_of(process for process in psutil.process_iter() if process.pid != os.getpid())
    return own | others


def unlink_own(known: Collection[Path]) -> None:
    """Remove listed files, also this process's own. Those that others use, or that bear the trainer's number, stay."""
    own = {file for file in known if os.getppid() not in _numbers(file)}
    if own:
        unlink(own - shared_memory_of(process for process in psutil.process_iter() if process.pid != os.getpid()))


def _files() -> dict[Path, int]:
    """Return the inode of each file of shared memory; none if the folder is missing or cannot be read."""
    try:
        with os.scandir(_SHARED_MEMORY) as entries:
            return {Path(entry.path): entry.inode() for entry in entries}
    except OSError:
        return {}


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def _numbers(file: Path) -> set[int]:
    """Return the numbers in a file's name, of which some are process ids."""
    return {int(number) for number in _NUMBERS.findall(file.name)}
