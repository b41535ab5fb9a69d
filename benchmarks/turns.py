"""Turns of processes that share a machine: most of the time of each is an engine that starts, which disturbs none."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def turn(file: str | None) -> AbstractContextManager[None]:
    """Wait until no other process has its turn with ``file``, and hold it. Without a file, do not wait."""
    return nullcontext() if file is None else _held(file)


@contextmanager
def _held(file: str) -> Iterator[None]:
    with Path(file).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
