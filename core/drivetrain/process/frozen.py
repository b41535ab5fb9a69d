"""Processes that are stopped by a signal, by a debugger, or by the kernel's freezer of control groups."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

import psutil

_STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def is_frozen(process: psutil.Process) -> bool:
    """Return whether a process is stopped, or its control group is frozen (``docker pause``, ``systemctl freeze``).

    A frozen process looks asleep to psutil. The control group is that of the process, or one above it.

    Raises:
        psutil.NoSuchProcess: The process has ended.
    """
    if process.status() in _STOPPED:
        return True
    try:
        groups = Path(f"/proc/{process.pid}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False  # it has ended, or this system has no control groups
    mounts = _freezers()
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if "freezer" in controllers.split(","):
            state = _read(mounts.get("freezer"), path, "freezer.state")
            if "FROZEN" in state or "FREEZING" in state:
                return True
        elif not controllers and "frozen 1" in _read(mounts.get(""), path, "cgroup.events"):
            return True
    return False


def _read(mount: tuple[str, Path] | None, path: str, name: str) -> list[str]:
    """Return the lines of a group's file; none if it cannot be seen. The root of all groups has no such file."""
    if mount is None:
        return []
    root, folder = mount
    try:
        below = Path(path).relative_to(root)
        return (folder / below / name).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []


@functools.cache
def _freezers() -> dict[str, tuple[str, Path]]:
    """Return the root and the mount point of the hierarchies that can freeze: ``""`` version 2, ``freezer`` version 1.

    Source: proc_pid_mountinfo(5).
    """
    found: dict[str, tuple[str, Path]] = {}
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        root, folder = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            found[""] = root, Path(folder)
        elif kind == "cgroup" and "freezer" in options.split(","):
            found["freezer"] = root, Path(folder)
    return found
