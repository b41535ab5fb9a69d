"""Processes that are stopped by a signal, or by the kernel's freezer of control groups."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Final

import psutil

_PROC: Final = Path("/proc")
_VERSION_1: Final = "freezer"
_VERSION_2: Final = ""


def is_frozen(process: psutil.Process) -> bool:
    """Return whether a process is stopped, or its control group is frozen (``docker pause``, ``systemctl freeze``).

    A frozen process looks asleep to psutil. The control group is that of the process, or one above it. A process that a
    debugger holds is not frozen, nor is one whose state cannot be read.

    Raises:
        psutil.NoSuchProcess: The process has ended.
    """
    try:
        return process.status() == psutil.STATUS_STOPPED or in_frozen_group(process.pid)
    except (psutil.AccessDenied, OSError):  # for example, this process has no free file descriptor
        return False


def in_frozen_group(pid: int, proc: Path = _PROC) -> bool:
    """Return whether the kernel has frozen a process's control group, or is freezing it.

    Malformed lines, and groups that this process cannot see, are passed over.

    Args:
        pid: The process.
        proc: The folder where the proc file system is mounted.

    Raises:
        OSError: The process has ended, or this system has no control groups.
    """
    groups = _lines(proc / str(pid) / "cgroup")
    mounts = _freezers(proc)
    for group in groups:
        match group.split(":", 2):
            case [_, "", path]:
                frozen = _state(mounts, _VERSION_2, path, "cgroup.events") & {"frozen 1"}
            case [_, controllers, path] if "freezer" in controllers.split(","):
                frozen = _state(mounts, _VERSION_1, path, "freezer.state") & {"FROZEN", "FREEZING"}
            case _:
                continue
        if frozen:
            return True
    return False


def _state(mounts: list[tuple[str, str, Path]], version: str, path: str, name: str) -> set[str]:
    """Return the lines of a group's file; none if it cannot be seen. The root of all groups has no such file."""
    lines: set[str] = set()
    for mounted, root, folder in mounts:
        if mounted == version:
            try:
                lines.update(_lines(folder / Path(path).relative_to(root) / name))
            except (OSError, ValueError):  # the group has gone, or lies outside this mount
                continue
    return lines


@functools.cache
def _freezers(proc: Path) -> list[tuple[str, str, Path]]:
    """Return version, root and mount point of each mounted hierarchy that can freeze.

    Source: proc_pid_mountinfo(5).
    """
    found: list[tuple[str, str, Path]] = []
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        # Split at single spaces: the source of a mount may be empty.
        match before.split(" "), after.split(" "):
            case [_, _, _, root, folder, *_], ["cgroup2", *_]:
                found.append((_VERSION_2, _unescaped(root), Path(_unescaped(folder))))
            case [_, _, _, root, folder, *_], ["cgroup", _, options, *_] if "freezer" in options.split(","):
                found.append((_VERSION_1, _unescaped(root), Path(_unescaped(folder))))
            case _:
                continue
    return found


def _unescaped(field: str) -> str:
    r"""Return a field of mountinfo without its octal escapes of spaces and backslashes, as in ``a\134x2db.slice``."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), field)


def _lines(file: Path) -> list[str]:
    """Return the lines of a file. Names in it may hold any byte but a line feed."""
    return os.fsdecode(file.read_bytes()).split("\n")
