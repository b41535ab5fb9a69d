"""A folder that holds one push, and that vanishes with its owner, however that ends."""

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

_PREFIX: Final = "drivetrain-weights-"
_LOCK: Final = "lock"


class PushFolder:
    """A new folder. What owners that were killed left beside it is removed with the next that is made on their host.

    Args:
        directory: where it is made, readable by the engine's process; None: the temporary folder.
    """

    def __init__(self, directory: Path | None) -> None:
        prefix = f"{_PREFIX}{socket.gethostname()}-"
        parent = Path(tempfile.gettempdir() if directory is None else directory)
        _remove_orphans(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Remove it with all that it holds."""
        shutil.rmtree(self.path)
        if self._lock is not None:
            os.close(self._lock)


def _locked(folder: Path) -> int | None:
    """Show that the folder's owner lives; the system unlocks it when that ends, however it ends."""
    lock = os.open(folder / f"{_LOCK}ing", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: nobody will remove it for us
        os.close(lock)
        return None
    (folder / f"{_LOCK}ing").rename(folder / _LOCK)  # never there without being locked
    return lock


def _remove_orphans(directory: Path, prefix: str) -> None:
    """Remove the folders of senders that were killed."""
    for lock in directory.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with suppress(OSError), lock.open("r+b") as file:  # it was removed meanwhile, or its owner lives
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
