"""Killing a host process with all its descendants and their files."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from drivetrain.backend.toolkit.owned_folder import LOCK

MARK: Final = "DRIVETRAIN_HOST"
"""Environment variable of the host and its descendants; its value identifies the host."""

SCRATCH: Final = "DRIVETRAIN_HOST_FOLDER"
"""Environment variable with the host's temporary folder, which is deleted with the host."""

_SHARED_MEMORY: Final = Path("/dev/shm")
_SEMAPHORE: Final = "sem.mp-"
_LIST: Final = "drivetrain-shared-memory"
"""Name of the list of a host's shared-memory files in its temporary folder: inode and path, a line for each."""
_NUMBERS: Final = re.compile(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])")
_logger = logging.getLogger("drivetrain.host")
_PATIENCE_S: Final = 3.0
_TICK_S: Final = 0.2
_ROUNDS: Final = 3


def family(host: int, mark: str) -> list[psutil.Process]:
    """Find the processes of the host ``host``: its session, its descendants, and processes with its mark.

    Each sign alone can fail: a child can leave the session, becomes an orphan when its parent is killed, and loses its
    environment if it sets its process title. The result never includes the calling process.
    """
    found: set[psutil.Process] = set()
    try:
        found.update(psutil.Process(host).children(recursive=True))
    except psutil.NoSuchProcess:
        pass  # already gone; the other two signs remain
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == host or process.environ().get(MARK) == mark:
                found.add(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or owned by another user
    return [process for process in found if process.pid != os.getpid()]


def kill_family(host: int, mark: str, known: Iterable[Path] = (), since: float = 0.0) -> None:
    """Kill (SIGKILL) all processes of a host and wait until they are gone; log any that remain.

    Also removes their shared memory, which killed processes leave behind.

    Args:
        host: Process id of the host.
        mark: Value of :data:`MARK` in its environment.
        known: Files seen in use earlier: those of a process that is already dead cannot be found.
        since: Time of the host's start, in seconds since the epoch. Files that did not change from then on, such as a
            dataset, are kept.
    """
    left: list[psutil.Process] = []
    killed: set[int] = set()
    files = set(known)
    for _ in range(_ROUNDS):  # the next round finds processes that forked meanwhile
        left = [process for process in family(host, mark) if runs(process)]
        if not left:
            break
        files |= shared_memory_of(left)
        killed |= {process.pid for process in left}
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        # Not psutil.wait_procs: it would reap the host, and its parent could not read the exit status.
        patience = time.monotonic() + _PATIENCE_S
        while any(map(runs, left)) and time.monotonic() < patience:
            time.sleep(0.005)
    unlink(_left_by(killed, {file for file in files if _changed_since(file, since)}))
    if left := [process for process in left if runs(process)]:
        _logger.error("these processes of an engine's host do not end: %s", ", ".join(map(str, left)))


def _changed_since(file: Path, since: float) -> bool:
    """Return False for a file that was there before the host, such as a dataset, and for one that is gone."""
    try:
        return file.stat().st_ctime >= since
    except OSError:
        return False


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared-memory files that these processes have mapped."""
    # By inode: a semaphore's creator has mapped it under a temporary name that no longer exists.
    files: dict[int, Path] = {}
    for file in _SHARED_MEMORY.glob("*"):  # empty if there is no such folder
        try:
            files[file.stat().st_ino] = file
        except OSError:
            continue  # removed meanwhile
    found: set[Path] = set()
    for process in processes if files else ():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # ended meanwhile, or owned by another user
        columns = (line.split(maxsplit=5) for line in maps.splitlines() if f"{_SHARED_MEMORY}/" in line)
        found |= {files[inode] for inode in (int(column[4]) for column in columns) if inode in files}
    return found


def _left_by(killed: Collection[int], files: Collection[Path]) -> set[Path]:
    """Choose the files to remove among those that the killed processes used.

    These are semaphores of Python's multiprocessing, files named after a killed process, and files that no process
    uses any more. Files named after this process or its parent are kept: they may have been lent.
    """
    numbers = {file: {int(number) for number in _NUMBERS.findall(file.name)} for file in files}
    own = {file for file in files if file.name.startswith(_SEMAPHORE) or not numbers[file].isdisjoint(killed)}
    others = {file for file in set(files) - own if numbers[file].isdisjoint((os.getpid(), os.getppid()))}
    if others:
        others -= shared_memory_of(process for process in psutil.process_iter() if process.pid != os.getpid())
    return own | others


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
    (folder / _LIST).write_bytes(os.fsencode("".join(lines)))


def unlink_listed(folder: Path) -> None:
    """Remove the shared memory of a host that was killed at once with its trainer, which would have removed it.

    Raises:
        BlockingIOError: A process of the host outlives it, and uses a file: nothing was removed.
    """
    files = _listed(folder)
    used = files & shared_memory_of(psutil.process_iter()) if files else set()
    if used:
        raise BlockingIOError(f"still in use: {', '.join(map(str, used))}")
    unlink(files)


def _listed(folder: Path) -> set[Path]:
    """Return the listed files that are still there."""
    try:
        *lines, _ = os.fsdecode((folder / _LIST).read_bytes()).split("\n")  # the last one may be cut off
    except FileNotFoundError:
        return set()  # the host had not started
    files: set[Path] = set()
    for inode, _, path in (line.partition(" ") for line in lines):
        with suppress(FileNotFoundError, ValueError):  # removed meanwhile; the second line of a name with a line break
            if Path(path).stat().st_ino == int(inode):
                files.add(Path(path))
    return files


def unlink(files: Iterable[Path]) -> None:
    """Remove files; missing ones are ignored."""
    for file in files:
        file.unlink(missing_ok=True)


def end_own_family() -> None:
    """Kill all descendants of this host process, reap its children, and delete its temporary folder."""
    mark = os.environ.get(MARK)
    if mark is None:
        return  # started by hand: its session may hold foreign processes
    scratch = os.environ.get(SCRATCH)
    folder = None if scratch is None else Path(scratch)
    known = set() if folder is None else _listed(folder)
    kill_family(os.getsid(0), mark, known, 0.0 if folder is None else _begun(folder))
    _unlink_own(known)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        pass  # no children left
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _begun(folder: Path) -> float:
    """Return when a host's temporary folder was made, in seconds since the epoch; 0 if that is not known."""
    try:
        return (folder / LOCK).stat().st_mtime
    except OSError:
        return 0.0


def _unlink_own(known: Collection[Path]) -> None:
    """Remove listed files, also this process's own. Those that others use, or that bear the trainer's number, stay."""
    own = {file for file in known if str(os.getppid()) not in _NUMBERS.findall(file.name)}
    if own:
        unlink(own - shared_memory_of(process for process in psutil.process_iter() if process.pid != os.getpid()))


def end_with(host: int) -> None:
    """Wait until ``host``, this process's parent, is gone; then end this process and all others of the host.

    Ray kills an actor with its children: a host and its trainer at once, so that neither can end the host's processes.
    """
    while os.getppid() == host:
        time.sleep(_TICK_S)
    end_own_family()
    os.kill(os.getpid(), signal.SIGKILL)


def ending(returncode: int) -> str:
    """Describe how a process ended, from its return code."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    name = signal_name(-returncode)
    hint = " (unless someone did that, the kernel was out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``"SIGKILL"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def runs(process: psutil.Process) -> bool:
    """Return True until all threads of the process have ended; a zombie that its parent has not reaped has ended.

    The first thread of a killed process can be a zombie before the others have ended, which still hold its memory, its
    files and their locks.
    """
    try:
        if not process.is_running():
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False
