"""Frozen processes, recognised by files like those of the kernel, and by the kernel's own."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from drivetrain.process.frozen import in_frozen_group, is_frozen

PID = 7
PTRACE_ATTACH = 16


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for folder in ("self", str(PID)):
        (tmp_path / "proc" / folder).mkdir(parents=True)
    return tmp_path / "proc"


@pytest.fixture
def sleeping() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def mount(folder: Path, version: int, root: str = "/") -> bytes:
    """Return the line of mountinfo of a hierarchy that can freeze."""
    kind = "cgroup2 cgroup2 rw,nsdelegate" if version == 2 else "cgroup cgroup rw,freezer"
    return os.fsencode(f"37 31 0:34 {root} {folder} rw,relatime shared:9 - {kind}")


def group_of(folder: Path, version: int, path: str, state: str) -> str:
    """Make a group below a mount point, and return its line in the cgroup file of its processes.

    Args:
        folder: The mount point.
        version: 1 or 2.
        path: The group, seen from the mount point.
        state: The state as the kernel writes it for this version.
    """
    (folder / path).mkdir(parents=True)
    name = "cgroup.events" if version == 2 else "freezer.state"
    (folder / path / name).write_text(f"populated 1\n{state}\n" if version == 2 else f"{state}\n")
    return f"0::/{path}" if version == 2 else f"6:cpu,freezer:/{path}"


def write(proc: Path, mounts: list[bytes], *groups: str) -> None:
    (proc / "self" / "mountinfo").write_bytes(b"".join(line + b"\n" for line in mounts))
    (proc / str(PID) / "cgroup").write_text("".join(f"{group}\n" for group in groups))


STATES = [
    *[(2, "frozen 1", True), (2, "frozen 0", False)],
    *[(1, "FROZEN", True), (1, "FREEZING", True), (1, "THAWED", False)],
]


@pytest.mark.parametrize(("version", "state", "frozen"), STATES)
def test_a_group_of_either_version(proc: Path, tmp_path: Path, version: int, state: str, frozen: bool) -> None:
    group = group_of(tmp_path / "mounted", version, "docker/5f", state)
    write(proc, [mount(tmp_path / "mounted", version)], "1:name=systemd:/", group)
    assert in_frozen_group(PID, proc) == frozen


@pytest.mark.parametrize(("version", "state", "frozen"), STATES)
def test_both_versions_mounted(proc: Path, tmp_path: Path, version: int, state: str, frozen: bool) -> None:
    other = 3 - version
    folders = {number: tmp_path / f"mounted-{number}" for number in (1, 2)}
    still = group_of(folders[other], other, "other", "THAWED" if other == 1 else "frozen 0")
    write(
        proc,
        [mount(folder, number) for number, folder in folders.items()],
        *(still, group_of(folders[version], version, "own", state)),
    )
    assert in_frozen_group(PID, proc) == frozen


@pytest.mark.parametrize("root", ["/docker/5f", "/a slice/5f", "/a-5\\x2d1.slice"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_mount_whose_root_is_a_group(proc: Path, tmp_path: Path, version: int, root: str) -> None:
    folder = tmp_path / "mounted"
    line = group_of(folder, version, "inner", "frozen 1" if version == 2 else "FROZEN")
    escaped = root.replace("\\", "\\134").replace(" ", "\\040")
    write(proc, [mount(folder, version, escaped)], line.replace("/inner", f"{root}/inner"))
    assert in_frozen_group(PID, proc)


@pytest.mark.parametrize("version", [1, 2])
def test_a_second_mount_that_shows_other_groups(proc: Path, tmp_path: Path, version: int) -> None:
    line = group_of(tmp_path / "mounted", version, "own", "frozen 1" if version == 2 else "FROZEN")
    mounts = [mount(tmp_path / "mounted", version), mount(tmp_path / "elsewhere", version, "/other")]
    write(proc, mounts, line)
    assert in_frozen_group(PID, proc)


ODD_MOUNTS = {
    "an empty source": b"40 27 0:50 / /x rw,relatime - tmpfs  rw",
    "a name that is not UTF-8": b"40 27 0:50 / /mnt/caf\xe9 rw,relatime - tmpfs tmpfs rw",
    "a name with a line separator": "40 27 0:50 / /mnt/a\u2028b rw,relatime - tmpfs tmpfs rw".encode(),
    "no separator": b"40 27 0:50 / /x rw,relatime",
    "too few fields": b"40 27 - cgroup2",
    "version 1 without options": b"40 27 0:50 / /x rw - cgroup cgroup",
    "an empty line": b"",
}


@pytest.mark.parametrize("odd", ODD_MOUNTS.values(), ids=ODD_MOUNTS)
@pytest.mark.parametrize(("version", "state", "frozen"), STATES)
def test_odd_mounts_are_passed_over(
    proc: Path, tmp_path: Path, odd: bytes, version: int, state: str, frozen: bool
) -> None:
    group = group_of(tmp_path / "mounted", version, "own", state)
    write(proc, [odd, mount(tmp_path / "mounted", version), odd], group)
    assert in_frozen_group(PID, proc) == frozen


@pytest.mark.parametrize("odd", ["", "0", "6:freezer", "nothing:", "0::/of another mount", "0::/a\0b"])
@pytest.mark.parametrize(("version", "state", "frozen"), STATES)
def test_odd_groups_are_passed_over(
    proc: Path, tmp_path: Path, odd: str, version: int, state: str, frozen: bool
) -> None:
    group = group_of(tmp_path / "mounted", version, "own", state)
    write(proc, [mount(tmp_path / "mounted", version)], odd, group, odd)
    assert in_frozen_group(PID, proc) == frozen


def test_a_group_and_a_mount_point_whose_names_are_not_utf8(proc: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    (folder / os.fsdecode(b"gr\xfc")).mkdir(parents=True)
    (folder / os.fsdecode(b"gr\xfc") / "cgroup.events").write_text("frozen 1\n")
    write(proc, [mount(folder, 2)])
    (proc / str(PID) / "cgroup").write_bytes(b"0::/gr\xfc\n")
    assert in_frozen_group(PID, proc)


@pytest.mark.parametrize("mounted", [(), (1,), (2,), (1, 2)])
def test_a_group_without_a_mount_or_a_file(proc: Path, tmp_path: Path, mounted: tuple[int, ...]) -> None:
    write(proc, [mount(tmp_path, version) for version in mounted], "0::/gone", "6:freezer:/gone")
    assert not in_frozen_group(PID, proc)


def test_files_that_cannot_be_read_are_read_again(proc: Path, tmp_path: Path) -> None:
    group = group_of(tmp_path / "mounted", 2, "own", "frozen 1")
    write(proc, [mount(tmp_path / "mounted", 2)], group)
    mountinfo = proc / "self" / "mountinfo"
    kept = mountinfo.rename(proc / "kept")
    with pytest.raises(FileNotFoundError):
        in_frozen_group(PID, proc)
    kept.rename(mountinfo)
    assert in_frozen_group(PID, proc)


def test_a_process_that_is_stopped_by_a_signal_is_frozen(sleeping: psutil.Process) -> None:
    assert not is_frozen(sleeping)
    sleeping.suspend()
    os.waitid(os.P_PID, sleeping.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_frozen(sleeping)


def test_a_process_that_a_debugger_holds_is_not_frozen(sleeping: psutil.Process) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, sleeping.pid, None, None):
        pytest.skip(f"this process may not trace its child: {os.strerror(ctypes.get_errno())}")
    os.waitpid(sleeping.pid, os.WUNTRACED)
    assert sleeping.status() == psutil.STATUS_TRACING_STOP
    assert not is_frozen(sleeping)


def test_a_process_that_cannot_be_looked_at_is_not_frozen(sleeping: psutil.Process) -> None:
    sleeping.suspend()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        assert not is_frozen(sleeping)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_has_ended_is_no_more() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        looked_at = psutil.Process(process.pid)
        process.kill()
    with pytest.raises(psutil.NoSuchProcess):
        is_frozen(looked_at)
