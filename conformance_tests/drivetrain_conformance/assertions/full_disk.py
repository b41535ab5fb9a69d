"""A disk without room, as processes see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import psutil

ROOM: Final = 4096
"""Bytes that fit into a file on the full disk."""


@contextmanager
def full_disk(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Let no file that the processes write grow beyond :data:`ROOM`.

    The limit needs no rights and no disk of its own. Python ignores its signal, so that writes fail with EFBIG, where a
    full disk's fail with ENOSPC.
    """
    limits = {process: process.rlimit(psutil.RLIMIT_FSIZE) for process in processes}
    try:
        for process, (_, hard) in limits.items():
            process.rlimit(psutil.RLIMIT_FSIZE, (ROOM, hard))
        yield
    finally:
        for process, limit in limits.items():
            if process.is_running():
                process.rlimit(psutil.RLIMIT_FSIZE, limit)
