"""Killing a host process with all its descendants and their files."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from drivetrain.backend.toolkit.owned_folder import LOCK
from drivetrain.process.shared_memory_files import (
    changed_since,
    left_by,
    listed,
    shared_memory_of,
    unlink,
    unlink_own,
)

MARK: Final = "DRIVETRAIN_HOST"
"""Environment variable of the host and its descendants; its value identifies the host."""

SCRATCH: Final = "DRIVETRAIN_HOST_FOLDER"
"""Environment variable with the host's temporary folder, which is deleted with the host."""

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
    unlink(left_by(killed, {file for file in files if changed_since(file, since)}))
    if left := [process for process in left if runs(process)]:
        _logger.error("these processes of an engine's host do not end: %s", ", ".join(map(str, left)))


def end_own_family() -> None:
    """Kill all descendants of this host process, reap its children, and delete its temporary folder."""
    mark = os.environ.get(MARK)
    if mark is None:
        return  # started by hand: its session may hold foreign processes
    scratch = os.environ.get(SCRATCH)
    folder = None if scratch is None else Path(scratch)
    known = set() if folder is None else listed(folder)
    kill_family(os.getsid(0), mark, known, 0.0 if folder is None else _begun(folder))
    unlink_own(known)
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
