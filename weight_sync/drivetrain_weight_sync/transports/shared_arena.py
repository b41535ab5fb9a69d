"""A block of shared memory that holds a whole plan and disappears with its owner, even after ``kill -9``."""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch

from drivetrain.errors import InvalidRequest


class Arena:
    """Memory of this process that others can map by ``path``.

    It is an anonymous file, which the kernel frees with its last user, so ``kill -9`` leaves nothing behind. On systems
    without such files (macOS), it is a file in the temporary folder, removed on close and at exit.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("drivetrain-weights")
            self.path = f"/proc/{os.getpid()}/fd/{fd}"
            self._free: Callable[[], object] = weakref.finalize(self, os.close, fd)
        else:
            fd, self.path = tempfile.mkstemp(prefix="drivetrain-weights-")
            self._free = weakref.finalize(self, _close_and_remove, fd, self.path)
        # Mapping zero bytes is an error.
        os.ftruncate(fd, max(nbytes, 1))
        self.memory = torch.frombuffer(_map(fd, max(nbytes, 1), writable=True), dtype=torch.uint8)
        """uint8 ``[nbytes]``."""

    def close(self) -> None:
        """Free the memory, once the last process has unmapped it."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._free()


class MappedArena:
    """Another process's arena, read-only."""

    def __init__(self, path: str, nbytes: int) -> None:
        with _open(path) as file:
            info = os.fstat(file.fileno())
            if info.st_size < nbytes:
                raise InvalidRequest(
                    f"{path} holds {info.st_size} bytes, but the source says {nbytes}; push again from the trainer",
                    field="source.nbytes",
                )
            self.identity = (path, nbytes, info.st_dev, info.st_ino)
            mapped = _map(file.fileno(), max(nbytes, 1), writable=False)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns about this one, which is never written to.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
            """uint8 ``[nbytes]``; not to be written to."""

    def still(self, path: str, nbytes: int) -> bool:
        """Return whether ``path`` is still the same memory: file descriptor numbers are soon reused."""
        with _open(path) as file:
            info = os.fstat(file.fileno())
        return self.identity == (path, nbytes, info.st_dev, info.st_ino)


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InvalidRequest(
            f"the arena {path} cannot be opened ({error.strerror}); trainer and engine must run on one host as one "
            "user, and the trainer's WeightSync must be open",
            field="source.path",
        ) from error


def _map(fd: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    # A tensor keeps the mapping alive, but cannot prevent it from being closed under it: never close it, only drop it.
    # MAP_POPULATE makes the pages now, instead of by page faults while the engine is paused.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


def _close_and_remove(fd: int, path: str) -> None:
    os.close(fd)
    Path(path).unlink(missing_ok=True)
