"""A folder that is removed even after its owners were killed: by the next process on the same host that looks."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_logger: Final = logging.getLogger("drivetrain.folders")

LOCK: Final = "lock"
"""Name of the lock file. It holds the name of the owners' host: a network's file system may not lock across hosts."""
_LOCKING: Final = "locking"
"""Its name until it is locked."""
_UNLOCKED_S: Final = 3600.0
"""Age in seconds from which a folder that has only this file counts as made by a process that was killed meanwhile."""


class OwnedFolder:
    """A new folder with a lock file, which this process holds locked until it ends.

    :func:`remove_orphans` removes the folders of killed owners. Call it before, with the same arguments.

    A forked child is no owner. A program that forks and ends its parent, as a daemon does, must make its folders after
    that: folders that it made before are removed by the next process that looks, although the child uses them.

    Args:
        parent: The folder to create it in.
        prefix: First part of its name. In the temporary folder and in ``/tmp``, eight characters follow, because paths
            of Unix sockets are bounded; elsewhere also the name of this host.

    Raises:
        OSError: It cannot be created; no part of it is left.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_of_this_host(parent, prefix), dir=parent))
        self.lock: int | None
        """Descriptor of the lock; a process that inherits it owns the folder too. None: files cannot be locked."""
        try:
            self.lock = _locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        _owned.add(self)

    def remove(self) -> None:
        """Remove the folder with its contents, also if another owner has removed it in part; idempotent.

        Raises:
            OSError: It cannot be removed. Once all its owners have ended, :func:`remove_orphans` tries again.
        """
        try:
            _remove(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            if self.path.exists():
                raise
        self.let_go()

    def remove_or_leave(self, what: str) -> None:
        """Remove the folder; if it cannot be removed, log that ``what`` stays, and leave it to the next process."""
        try:
            self.remove()
        except OSError as error:
            self.let_go()
            _logger.warning("%s stays: %s", what, error)

    def let_go(self) -> None:
        """Own the folder no longer; another process that inherited the lock may."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


_owned: Final[weakref.WeakSet[OwnedFolder]] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for folder in list(_owned):
        folder.let_go()


# A forked child, such as a data loader's worker, may outlive this process, and would keep the folders locked.
os.register_at_fork(after_in_child=_let_go_of_all)


def remove_orphans(parent: Path, prefix: str, before: Callable[[Path], None] = lambda folder: None) -> None:
    """Remove the folders of this user with this prefix whose owners were killed on this host.

    Args:
        parent: The folder that they lie in.
        prefix: First part of their names.
        before: Called with each folder before it is removed; if it raises an OSError, the folder stays.
    """
    prefix = _of_this_host(parent, prefix)
    with suppress(OSError), os.scandir(parent) as entries:
        found = [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]
        for folder in found:
            with suppress(OSError):  # removed meanwhile, or an owner is alive
                _remove_orphan(folder, before)


def _remove_orphan(folder: Path, before: Callable[[Path], None]) -> None:
    if folder.lstat().st_uid != os.getuid():
        return
    try:
        lock = (folder / LOCK).open("r+b")
    except FileNotFoundError:
        aged = time.time() - folder.stat().st_mtime > _UNLOCKED_S
        if aged and [entry.name for entry in folder.iterdir()] == [_LOCKING]:
            shutil.rmtree(folder)
        return
    with lock:
        if lock.read() == socket.gethostname().encode():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before(folder)
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder. Remove the lock file last: a folder without it is never looked at again."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != LOCK:
                os.unlink(entry.path)
    shutil.rmtree(folder)


def _of_this_host(parent: Path, prefix: str) -> str:
    """Return the beginning of the names of this host's folders.

    Folders of several hosts may lie in the temporary folder too, if that is shared; their lock files tell.
    """
    temporary = parent in (Path(tempfile.gettempdir()), Path("/tmp"))
    return prefix if temporary else f"{prefix}{socket.gethostname()}-"


def _locked(folder: Path) -> int | None:
    """Lock a file in the folder while its owner lives; the system releases the lock when the last owner has ended."""
    lock = os.open(folder / _LOCKING, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.write(lock, socket.gethostname().encode())
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks; other processes leave a folder without either file alone
        os.close(lock)
        (folder / _LOCKING).unlink()
        return None
    (folder / _LOCKING).rename(folder / LOCK)  # the final name never exists unlocked
    return lock
