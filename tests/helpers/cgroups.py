"""Control groups that a test freezes: the kernel's own freezer, in both of its versions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PATIENCE_S = 10.0


class Freezer:
    """A control group of the test's own.

    Args:
        folder: The group.
        version: 1 or 2.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version

    def freeze(self, process: psutil.Process) -> None:
        """Take a process and its threads into the group, and freeze it."""
        (self._folder / "cgroup.procs").write_text(str(process.pid))
        self._set("FROZEN" if self._version == 1 else "1")

    def thaw(self) -> None:
        """Let the processes of the group run."""
        self._set("THAWED" if self._version == 1 else "0")

    def _set(self, value: str) -> None:
        (self._folder / ("freezer.state" if self._version == 1 else "cgroup.freeze")).write_text(value)


@contextmanager
def freezer(version: int) -> Iterator[Freezer | None]:
    """Make a control group and remove it at the end; None if this process may make none."""
    folder = _mount(version)
    folder = folder and folder / f"drivetrain-test-{time.monotonic_ns()}"
    try:
        if folder is not None:
            folder.mkdir()
    except OSError:
        folder = None
    if folder is None:
        yield None
        return
    made = Freezer(folder, version)
    try:
        yield made
    finally:
        made.thaw()
        patience = time.monotonic() + PATIENCE_S
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # its processes are ending
                if time.monotonic() > patience:
                    raise
                time.sleep(0.05)


def _mount(version: int) -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "freezer" in options.split(","):
            return Path(folder)
    return None
