"""A temporary folder for one push, removed even after its owner was killed."""

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
    """A new folder. Folders left beside it by killed processes are removed when the next one is made on their host.

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
        """Raise errors of writing to the folder as WeightSyncError; nothing was sent to the engine yet."""
        with _failing(self.path.parent):
            yield

    def remove(self) -> None:
        """Remove the folder with its contents."""
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
    """Lock a file in the folder while its owner lives; the system releases the lock when the process ends."""
    lock = os.open(folder / f"{_LOCK}ing", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # file system without locks: nobody will remove the folder for us
        os.close(lock)
        return None
    (folder / f"{_LOCK}ing").rename(folder / _LOCK)  # the final name never exists unlocked
    return lock


def _remove_orphans(directory: Path, prefix: str) -> None:
    """Remove folders of senders that were killed."""
    for lock in directory.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with suppress(OSError), lock.open("r+b") as file:  # removed meanwhile, or its owner is alive
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
