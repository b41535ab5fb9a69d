"""A folder that holds one push, and that vanishes with its owner, however that ends."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from drivetrain.errors import WeightSyncError

_PREFIX: Final = "drivetrain-weights-"
_LOCK: Final = "lock"


class PushFolder:
    """A new folder. What owners that were killed left beside it is removed with the next that is made on their host.

    Args:
        directory: where it is made, readable by the engine's process; None: the temporary folder.

    Raises:
        WeightSyncError: it cannot be made there; nothing is left.
    """

    def __init__(self, directory: Path | None) -> None:
        prefix = f"{_PREFIX}{socket.gethostname()}-"
        parent = Path(tempfile.gettempdir() if directory is None else directory)
        with _failing(parent):
            _remove_orphans(parent, prefix)
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            try:
                self._lock = _locked(self.path)
            except OSError:
                shutil.rmtree(self.path, ignore_errors=True)
                raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise what writing to it raises as a WeightSyncError: the engine was not asked for anything so far."""
        with _failing(self.path.parent):
            yield

    def remove(self) -> None:
        """Remove it with all that it holds."""
        shutil.rmtree(self.path)
        if self._lock is not None:
            os.close(self._lock)


@contextmanager
def _failing(parent: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"the weights cannot be written to {parent} ({error}); nothing was changed. Make room there, or name a "
            "folder with room by directory=…"
        ) from error


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
