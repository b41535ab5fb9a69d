"""Ending a host process with everything that came of it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import psutil

MARK: Final = "DRIVETRAIN_HOST"
"""Environment variable that the host and all that descends from it carry; its value names the host."""

SCRATCH: Final = "DRIVETRAIN_HOST_FOLDER"
"""Environment variable with the host's temporary folder, which goes when the host goes."""

_SHARED_MEMORY: Final = Path("/dev/shm")
_SEMAPHORE: Final = "sem.mp-"
_NUMBERS: Final = re.compile(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])")
_logger = logging.getLogger("drivetrain.host")
_PATIENCE_S: Final = 3.0
_ROUNDS: Final = 3


def family(host: int, mark: str) -> list[psutil.Process]:
    """Find what belongs to the host process ``host``: its session, its descendants, and what carries its mark.

    No one sign is enough: a child can leave the session, it is orphaned when its parent is killed, and programs
    that set their process title overwrite their environment. Never includes the calling process.
    """
    found: set[psutil.Process] = set()
    try:
        found.update(psutil.Process(host).children(recursive=True))
    except psutil.NoSuchProcess:
        pass  # it is gone; the other two signs remain
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == host or process.environ().get(MARK) == mark:
                found.add(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's and so not ours
    return [process for process in found if process.pid != os.getpid()]


def kill_family(host: int, mark: str, known: Iterable[Path] = ()) -> None:
    """Kill (SIGKILL) everything of a host, and wait until it is gone; what is left after that is logged.

    Nobody removes the shared memory of the killed, so that is done here. ``known`` is what the family was seen to use:
    that of a process which is dead already is not found.
    """
    left: list[psutil.Process] = []
    killed: set[int] = set()
    files = set(known)
    for _ in range(_ROUNDS):  # what forked while we looked is found the next time
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
        # Not psutil.wait_procs: it would reap the host and keep its exit status from whoever started it.
        patience = time.monotonic() + _PATIENCE_S
        while any(map(runs, left)) and time.monotonic() < patience:
            time.sleep(0.005)
    unlink(_left_by(killed, files))
    if left := [process for process in left if runs(process)]:
        _logger.error("these processes of an engine's host do not end: %s", ", ".join(map(str, left)))


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """The files in shared memory that these processes use."""
    # By inode: whoever made a semaphore has mapped it under a temporary name that is gone.
    files: dict[int, Path] = {}
    for file in _SHARED_MEMORY.glob("*"):  # which finds nothing where there is no such folder
        try:
            files[file.stat().st_ino] = file
        except OSError:
            continue  # removed meanwhile
    found: set[Path] = set()
    for process in processes if files else ():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended meanwhile, or is another user's
        columns = (line.split(maxsplit=5) for line in maps.splitlines() if f"{_SHARED_MEMORY}/" in line)
        found |= {files[inode] for inode in (int(column[4]) for column in columns) if inode in files}
    return found


def _left_by(killed: Collection[int], files: Collection[Path]) -> set[Path]:
    """Choose what goes of the files that the killed used.

    Those are the semaphores of Python's multiprocessing, what is named after one of the killed, and what nobody uses
    any more, unless it is named after this process or its parent, who may have lent it.
    """
    numbers = {file: {int(number) for number in _NUMBERS.findall(file.name)} for file in files}
    own = {file for file in files if file.name.startswith(_SEMAPHORE) or not numbers[file].isdisjoint(killed)}
    others = {file for file in set(files) - own if numbers[file].isdisjoint((os.getpid(), os.getppid()))}
    if others:
        others -= shared_memory_of(process for process in psutil.process_iter() if process.pid != os.getpid())
    return own | others


def unlink(files: Iterable[Path]) -> None:
    """Remove files that may be gone."""
    for file in files:
        file.unlink(missing_ok=True)


def end_own_family() -> None:
    """From within a host: kill all that came of it and reap its children, so that they leave no zombies."""
    mark = os.environ.get(MARK)
    if mark is None:
        return  # started by hand, with who knows what in its session
    kill_family(os.getsid(0), mark)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        pass  # none left
    scratch = os.environ.get(SCRATCH)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def ending(returncode: int) -> str:
    """Say in words how a process ended."""
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
    """Whether it has not ended; a zombie has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


__all__ = [
    "MARK",
    "SCRATCH",
    "end_own_family",
    "ending",
    "family",
    "kill_family",
    "runs",
    "shared_memory_of",
    "signal_name",
    "unlink",
]
