"""A folder that is removed even after its owner was killed: by the next owner on the same host."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"


class OwnedFolder:
    """A new folder with a lock file. Folders beside it whose owners were killed on this host are removed first.

    Args:
        parent: The folder to create it in.
        prefix: First part of its name; only folders of the same prefix are removed.

    Raises:
        OSError: It cannot be created; no part of it is left.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        prefix = f"{prefix}{socket.gethostname()}-"
        _remove_orphans(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            self._lock = _locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder with its contents.

        Raises:
            OSError: It cannot be removed. If this process ends, the next owner tries again.
        """
        shutil.rmtree(self.path)
        if self._lock is not None:
            os.close(self._lock)


def _locked(folder: Path) -> int | None:
    """Lock a file in the folder while its owner lives; the system releases the lock when the process ends."""
    lock = os.open(folder / f"{_LOCK}ing", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks; other processes leave a folder without the lock's file alone
        os.close(lock)
        return None
    (folder / f"{_LOCK}ing").rename(folder / _LOCK)  # the final name never exists unlocked
    return lock


def _remove_orphans(directory: Path, prefix: str) -> None:
    """Remove folders of owners that were killed."""
    for lock in directory.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with suppress(OSError), lock.open("r+b") as file:  # removed meanwhile, or its owner is alive
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
